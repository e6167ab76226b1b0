"""Constant folding gives the bits that running the operation gives, for every operation that is folded, on random bits of every dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fusible import lazy
from fusible.lazy.dtypes import ALL, COMPUTED, FLOATS, INTEGERS, NUMBERS
from fusible.lazy.flat_ir import ops as flat_ops
from fusible.lazy.flat_ir.checker import check_flat_ir
from fusible.lazy.flat_ir.flat_ir import FlatIR
from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.flat_ir.ops import ConstantOp
from fusible.lazy.flat_ir.passes.constant_folding import FOLDED, MAX_ELEMENTS, constant_folding
from fusible.lazy.flat_ir.tensor import FlatIRTensor

_COUNT = 27

_BITS = INTEGERS | {lazy.bool}
_LOGIC = {flat_ops.AndOp, flat_ops.OrOp, flat_ops.XorOp}
_BINARY = {flat_ops.AddOp, flat_ops.DivideOp, flat_ops.MaxOp, flat_ops.MinOp, flat_ops.MulOp, flat_ops.SubtractOp}
_SIGNED = FLOATS | {lazy.int8, lazy.int64}
_GIVEN = (lazy.float32, lazy.float16, lazy.bfloat16, lazy.float64, lazy.int8, lazy.int64, lazy.uint8, lazy.bool)
_TARGETS = (lazy.float32, lazy.bfloat16, lazy.float8, lazy.int8, lazy.uint64, lazy.bool)
_DIRECTIONS = {lazy.float32: ("EQ", "NE", "LT", "LE", "GT", "GE")}
_MOVED = [
    (flat_ops.BroadcastOp, (2,), (3, 2), {"broadcast_dim": [1]}),
    (flat_ops.BroadcastOp, (1, 3), (3, 2), {"broadcast_dim": [1, 0]}),
    (flat_ops.ReshapeOp, (2, 3), (3, 2), {}),
    (flat_ops.TransposeOp, (2, 3), (3, 2), {"perm": [1, 0]}),
    (flat_ops.SliceOp, (4, 4), (2, 1), {"start": [1, 0], "limit": [4, 2], "stride": [2, 3]}),
]


def _values(of: lazy.dtype, rng: np.random.Generator, count: int = _COUNT) -> np.ndarray[Any, Any]:
    """Ordinary numbers, small whole ones, random bits and the special values."""
    if of.kind == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if of is lazy.int4:
        return rng.integers(-8, 8, count).astype(of.numpy)
    bits = rng.integers(0, 256, (count, of.numpy.itemsize), np.uint8).view(f"u{of.numpy.itemsize}").view(of.numpy).ravel()
    with np.errstate(all="ignore"):
        if of.is_integer:
            bits[::3] = rng.integers(-3 if of.kind == "int" else 0, 4, bits[::3].size)
        else:
            bits[::3] = (rng.standard_normal(bits[::3].size) * 50).astype(of.numpy)
            bits[1::9] = rng.integers(-3, 4, bits[1::9].size).astype(of.numpy)
            bits[:8] = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3.5, -2.5]).astype(of.numpy)
    return bits


def _literal(value: Any, of: lazy.dtype) -> FlatIRTensor:
    value = np.asarray(value)
    out = FlatIRTensor(value.shape, of, name=f"c{id(value)}", reason="be folded")
    with np.errstate(all="ignore"):
        wide = value.astype(np.float64) if of.is_floating or of.is_float8 else value.astype(object)
    ConstantOp([], [out], wide.tolist(), of)
    return out


def _apply(op: type[FlatIROp], operands: list[FlatIRTensor], shape: tuple[int, ...], of: lazy.dtype, **attributes: Any) -> FlatIRTensor:
    out = FlatIRTensor(shape, of, name="r", reason="be compared")
    op(operands, [out], **attributes)
    return out


Case = tuple[type[FlatIROp], tuple[lazy.dtype, ...], lazy.dtype, dict[str, Any]]


def _cases() -> list[Case]:
    cases: list[Case] = []
    for of in _GIVEN:
        if of in NUMBERS:
            cases += [(op, (of, of), of, {}) for op in sorted(_BINARY, key=str)]
            cases += [(flat_ops.CompareOp, (of, of), lazy.bool, {"direction": d}) for d in _DIRECTIONS.get(of, ("LT",))]
        if of in _BITS:
            cases += [(op, (of, of), of, {}) for op in sorted(_LOGIC, key=str)] + [(flat_ops.NotOp, (of,), of, {})]
        if of in _SIGNED:
            cases += [(op, (of,), of, {}) for op in (flat_ops.AbsOp, flat_ops.NegateOp)]
        if of in COMPUTED:
            cases += [(flat_ops.SelectOp, (lazy.bool, of, of), of, {})]
            cases += [(flat_ops.ConvertOp, (of,), to, {}) for to in _TARGETS if to is not of]
    return cases


_FOLDS_SOME: Callable[[Case], bool] = lambda case: case[2] is not lazy.bool or case[0] is not flat_ops.ConvertOp  # noqa: E731


def test_what_is_folded_has_the_bits_that_the_engine_gives() -> None:
    rng = np.random.default_rng(0)
    inputs: list[FlatIRTensor] = []
    data: list[np.ndarray[Any, Any]] = []
    ops: list[FlatIROp] = []
    folded: list[list[np.ndarray[Any, Any] | None]] = []
    for op, kinds, made, attributes in _cases():
        arrays = [_values(of, rng) for of in kinds]
        tensors = [FlatIRTensor(array.shape, of, name=f"t{len(inputs) + i}") for i, (array, of) in enumerate(zip(arrays, kinds, strict=True))]
        inputs, data = [*inputs, *tensors], [*data, *arrays]
        result = _apply(op, tensors, (_COUNT,), made, **attributes)
        assert result.producer is not None
        ops.append(result.producer)
        folded.append([_fold(op, [(array[i], of) for array, of in zip(arrays, kinds, strict=True)], made, attributes) for i in range(_COUNT)])
    for i, op in enumerate(ops):
        op.outputs[0].name = f"r{i}"
    cases = _cases()
    together: list[Any] = [None] * len(cases)
    for of in sorted({case[2] for case in cases}, key=str):  # one result per dtype: far fewer kernels to compile
        mine = [i for i, case in enumerate(cases) if case[2] is of]
        joined = _apply(flat_ops.ConcatenateOp, [ops[i].outputs[0] for i in mine], (_COUNT * len(mine),), of, dim=0)
        used = {t for i in mine for t in ops[i].inputs}
        given = [i for i, t in enumerate(inputs) if t in used]
        (whole,) = _program(FlatIR([inputs[i] for i in given], [*(ops[i] for i in mine), joined.producer], [joined]))([data[i] for i in given])
        for place, i in enumerate(mine):
            together[i] = whole[place * _COUNT : (place + 1) * _COUNT]
    for case, alone, engine in zip(cases, folded, together, strict=True):
        some = [i for i, value in enumerate(alone) if value is not None]
        assert bool(some) == _FOLDS_SOME(case), case
        got, want = (np.stack([values[i] for i in some]) if some else np.zeros(0) for values in (alone, engine))
        assert got.tobytes() == want.tobytes(), case


def _fold(op: type[FlatIROp], operands: list[tuple[Any, lazy.dtype]], made: lazy.dtype, attributes: dict[str, Any]) -> Any:
    tensors = [_literal(value, of) for value, of in operands]
    result = _apply(op, tensors, (), made, **attributes)
    flat = FlatIR([], [t.producer for t in (*tensors, result) if t.producer], [result])
    out = constant_folding(flat).outputs[0]
    return out.producer.array() if isinstance(out.producer, ConstantOp) else None


def _program(flat: FlatIR) -> Any:
    types = [[(t.shape, t.dtype) for t in tensors] for tensors in (flat.inputs, flat.outputs)]
    from_engine = lazy.engine.pjrt.PJRT().compile(flat.to_stablehlo().bytecode, *types)
    return lambda data: from_engine([np.ascontiguousarray(array) for array in data])


@pytest.mark.parametrize(("op", "shape", "result", "attributes"), _MOVED, ids=lambda v: getattr(v, "__name__", str(v)))
def test_small_tensors_move_as_the_engine_moves_them(op: Any, shape: Any, result: Any, attributes: Any) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    literal = _literal(array, lazy.float32)
    assert literal.producer is not None
    moved = _apply(op, [literal], result, lazy.float32, **attributes)
    assert moved.producer is not None
    flat = check_flat_ir(FlatIR([], [literal.producer, moved.producer], [moved]))
    once = check_flat_ir(constant_folding(flat))
    assert type(once.outputs[0].producer) is ConstantOp
    assert _program(once)([])[0].tolist() == _program(flat)([])[0].tolist()


def test_literals_of_every_dtype_reach_the_engine_bit_for_bit() -> None:
    rng = np.random.default_rng(1)
    arrays, outputs = [], []
    for of in sorted(ALL - {lazy.int4}, key=str):
        array = _values(of, rng, 24).reshape(4, 6)
        if not of.is_integer and of is not lazy.bool:
            array[np.isnan(array)] = 1
        arrays.append(array)
        outputs.append(_literal(array, of))
        outputs[-1].name = f"t{len(arrays)}"
    flat = FlatIR([], [t.producer for t in outputs if t.producer], outputs)
    for got, want in zip(_program(check_flat_ir(flat))([]), arrays, strict=True):
        assert got.tobytes() == want.tobytes(), want.dtype


def test_nothing_grows_beyond_a_small_size() -> None:
    for count in (MAX_ELEMENTS, MAX_ELEMENTS + 1):
        flat = lazy.Trace([lazy.full((count,), 2.0) * 3.0]).to_flat_ir()
        kinds = {type(op) for op in constant_folding(flat).ops}
        assert (kinds == {ConstantOp}) == (count == MAX_ELEMENTS)


def test_every_operation_that_is_folded_is_compared_here() -> None:
    assert set(FOLDED) == {case[0] for case in _cases()} | {op for op, *_ in _MOVED} | {flat_ops.ConcatenateOp}
    joined = lazy.Trace([lazy.concatenate([lazy.full((2,), 1.0), lazy.full((1,), 2.0)], 0)]).to_flat_ir().run(constant_folding)
    assert joined.outputs[0].producer.data == [1.0, 1.0, 2.0]  # type: ignore[union-attr]


def test_what_engines_may_do_otherwise_is_left_to_them() -> None:
    tiny = lazy.full((), 1e-40)
    left = [tiny * 1.0, lazy.full((), 1e-30) * 1e-10, lazy.full((), float("inf")) - float("inf"), lazy.exp(lazy.full((), 1.0))]
    for tensor in left:
        producer = lazy.Trace([tensor]).to_flat_ir().run(constant_folding).outputs[0].producer
        assert not isinstance(producer, ConstantOp), producer
    for dividend, divisor in ((1, 0), (lazy.int32.min, -1)):
        assert _fold(flat_ops.DivideOp, [(np.array(v, np.int32), lazy.int32) for v in (dividend, divisor)], lazy.int32, {}) is None
    assert _fold(flat_ops.ConvertOp, [(np.float64(1 + 2**-8 + 2**-40), lazy.float64)], lazy.bfloat16, {}) is None  # some round by way of float32
    for narrow in (lazy.float16, lazy.float8, lazy.float8e5m2):  # beyond its range: infinite, NaN or the largest number
        assert _fold(flat_ops.ConvertOp, [(np.float32(1e6), lazy.float32)], narrow, {}) is None
    assert _fold(flat_ops.MaxOp, [(np.float32(v), lazy.float32) for v in (0.0, -0.0)], lazy.float32, {}) is None
    small = float(ml_dtypes.finfo(np.float32).smallest_normal)
    assert isinstance(lazy.Trace([lazy.full((), small) * 1.0]).to_flat_ir().run(constant_folding).outputs[0].producer, ConstantOp)
