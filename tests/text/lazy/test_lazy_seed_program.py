"""The printed form of every IR, frozen: the tanh program, and a program with inputs, stored tensors and broadcasting."""

from __future__ import annotations

import numpy as np

from fusible import lazy
from fusible.errors import ShapeError

_TRACE = """\
==== Trace IR ====
t0 = fill(value=0.5, shape=(2, 3), dtype=float32)
t1 = unaryelementwise(t0, kind=Kind.TANH)
outputs:
    t1: [shape=(2, 3,), dtype=(float32), loc=(gpu:0)]"""

_FLAT = """\
==== Flat IR ====
t_inter1: [shape=(), dtype=(float32), loc=(gpu:0)] = ConstantOp(data=0.5, dtype=float32, device=gpu:0)
t0: [shape=(2, 3,), dtype=(float32), loc=(gpu:0)] = BroadcastOp(t_inter1, broadcast_dim=[])
t1: [shape=(2, 3,), dtype=(float32), loc=(gpu:0)] = TanhOp(t0)
outputs:
    t1: [shape=(2, 3,), dtype=(float32), loc=(gpu:0)]"""

_STABLEHLO = """\
==== StableHLO IR ====
1: module {
2:   func.func @main() -> tensor<2x3xf32> {
3:     %cst = stablehlo.constant dense<5.000000e-01> : tensor<f32>
4:     %0 = stablehlo.broadcast_in_dim %cst, dims = [] : (tensor<f32>) -> tensor<2x3xf32>
5:     %1 = stablehlo.tanh %0 : tensor<2x3xf32>
6:     return %1 : tensor<2x3xf32>
7:   }
8: }
9:"""


def test_the_tanh_program_prints_as_designed() -> None:
    inp = lazy.full((2, 3), value=0.5)
    out = inp.tanh()
    trace = lazy.Trace([out])
    flat = trace.to_flat_ir()
    assert str(trace) == _TRACE
    assert str(flat) == _FLAT
    assert str(flat.to_stablehlo()) == _STABLEHLO


def test_the_tanh_program_computes() -> None:
    out = lazy.full((2, 3), value=0.5).tanh()
    np.testing.assert_allclose(out.numpy(), np.full((2, 3), np.tanh(0.5)), rtol=2e-7)
    assert str(lazy.Trace([out])) == (
        "==== Trace IR ====\nt0 = storage(shape=(2, 3), dtype=float32)\noutputs:\n    t0: [shape=(2, 3,), dtype=(float32), loc=(gpu:0)]"
    )


_COMPILED = """\
==== Trace IR ====
inputs:
    x: [shape=(4, 2,), dtype=(bfloat16), loc=(gpu:0)]
t1 = storage(shape=(2, 3), dtype=bfloat16)
t2 = matrixmultiplication(x, t1, dtype=float32)
t3 = fill(value=2.0, shape=(), dtype=float32)
t4 = binaryelementwise(t2, t3, kind=Kind.MUL)
outputs:
    t4: [shape=(4, 3,), dtype=(float32), loc=(gpu:0)]"""

_COMPILED_FLAT = """\
==== Flat IR ====
inputs:
    x: [shape=(4, 2,), dtype=(bfloat16), loc=(gpu:0)]
    t1: [shape=(2, 3,), dtype=(bfloat16), loc=(gpu:0)]
t2: [shape=(4, 3,), dtype=(float32), loc=(gpu:0)] = DotOp(x, t1, contracting=([1], [0]), batch=([], []))
t3: [shape=(), dtype=(float32), loc=(gpu:0)] = ConstantOp(data=2.0, dtype=float32, device=gpu:0)
t_inter1: [shape=(4, 3,), dtype=(float32), loc=(gpu:0)] = BroadcastOp(t3, broadcast_dim=[])
t4: [shape=(4, 3,), dtype=(float32), loc=(gpu:0)] = MulOp(t2, t_inter1)
outputs:
    t4: [shape=(4, 3,), dtype=(float32), loc=(gpu:0)]"""


def test_inputs_and_stored_tensors_print() -> None:
    weight = lazy.Tensor(np.zeros((2, 3)), dtype=lazy.bfloat16)
    executable = lazy.compile(lambda x: lazy.matmul(x, weight, dtype=lazy.float32) * 2, args=[lazy.InputInfo((4, 2), lazy.bfloat16)])
    assert str(executable.trace) == _COMPILED
    assert str(executable.flat_ir) == _COMPILED_FLAT
    assert "func.func @main(%arg0: tensor<4x2xbf16>, %arg1: tensor<2x3xbf16>) -> tensor<4x3xf32>" in executable.stablehlo.text


def test_errors_are_one_sentence_that_names_the_line() -> None:
    a, b = lazy.zeros((2, 3)), lazy.zeros((2, 4))
    try:
        a + b
    except ShapeError as error:
        text = str(error).replace(__file__, "user.py")
    line = test_errors_are_one_sentence_that_names_the_line.__code__.co_firstlineno + 1
    assert text == (
        f"user.py:{line + 2}, in test_errors_are_one_sentence_that_names_the_line\n    a + b\n    ^^^^^\n"
        "the operands of add: expected sizes that are equal or 1, counted from the last dimension, "
        f"got float32 [2, 3] (made at user.py:{line}) and float32 [2, 4] (made at user.py:{line}); reshape one of them."
    )
