"""The printed form of functions that are one trace operation each, frozen: their attributes, and what their lowering says about itself."""

from __future__ import annotations

import numpy as np

from fusible import lazy
from fusible.lazy.flat_ir.passes import DEFAULT_PASSES

_TRACE = """\
==== Trace IR ====
t0 = storage(shape=(4, 6), dtype=float32)
t1 = fill(value=0.5, shape=(), dtype=float32)
t2 = quantize(t0, t1, dtype=int8, dim=None)
t3 = storage(shape=(6,), dtype=bfloat16)
t4 = dequantize(t2, t3, dtype=bfloat16, dim=1)
t5 = triangle(t4, lower=True, diagonal=-1)
t6 = unaryelementwise(t5, kind=Kind.GELU)
t7 = storage(shape=(), dtype=uint64)
t8 = randomnormal(t7, shape=(6,), dtype=bfloat16, mean=0.0, std=2.0)
t9 = binaryelementwise(t6, t8, kind=Kind.FLOOR_DIV)
t10 = copy(t9, device=cpu:0)
outputs:
    t10: [shape=(4, 6,), dtype=(bfloat16), loc=(cpu:0)]"""


def test_functions_print_as_one_operation_each() -> None:
    x = lazy.Tensor(np.zeros((4, 6), np.float32))
    q = x.quantize(0.5, lazy.int8).dequantize(lazy.Tensor(np.ones(6), dtype=lazy.bfloat16), lazy.bfloat16, 1)
    out = (q.tril(-1).gelu() // lazy.randn((6,), std=2.0, dtype=lazy.bfloat16, seed=0)).copy(lazy.device("cpu"))
    assert str(lazy.Trace([out])) == _TRACE


_QUANTIZE = """\
ConvertOp float64: divide by the scale, rounding once
ConvertOp float64: divide by the scale, rounding once
BroadcastOp float64: give every element its scale
DivideOp float64: divide by the scale, rounding once
ConvertOp float32: divide by the scale, rounding once
RoundNearestEvenOp float32: round a quotient to the nearest integer, ties to even
CompareOp bool: make 0 of NaN
ConstantOp int8: make 0 of NaN
BroadcastOp int8: make 0 of NaN
ConstantOp float32: saturate at the range of int8
BroadcastOp float32: saturate at the range of int8
ConstantOp float32: saturate at the range of int8
BroadcastOp float32: saturate at the range of int8
ClampOp float32: saturate at the range of int8
ConvertOp int8: saturate at the range of int8
SelectOp int8: None"""


def test_what_quantize_lowers_to_says_why() -> None:
    x, scale = (lazy.Tensor(np.ones(shape, np.float16)) for shape in ((2, 30), (30,)))
    flat = lazy.Trace([x.quantize(scale, lazy.int8, 1)]).to_flat_ir().run(*DEFAULT_PASSES)
    assert "\n".join(f"{type(op).__name__} {op.outputs[0].dtype}: {op.outputs[0].reason_details}" for op in flat.ops) == _QUANTIZE
