"""Passes over a FlatIR: what each takes away, what it must leave, and what it says that it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar

import numpy as np
import pytest

from fusible import lazy
from fusible.lazy.engine import pjrt
from fusible.lazy.flat_ir.checker import check_flat_ir
from fusible.lazy.flat_ir.op import FLAT_OPS, FlatIROp, frozen
from fusible.lazy.flat_ir.ops import ConstantOp, DotOp, TanhOp, TransposeOp
from fusible.lazy.flat_ir.passes import (
    DEFAULT_PASSES,
    PASSES,
    common_subexpression,
    constant_deduplication,
    constant_folding,
    dead_code,
    dot_layout,
    function_deduplication,
)
from fusible.lazy.flat_ir.passes.function_deduplication import MIN_OPERATIONS
from fusible.lazy.flat_ir.tensor import FlatIRTensor


def _kinds(flat: lazy.FlatIR) -> list[str]:
    return [type(op).__name__ for op in flat.ops]


def _program() -> lazy.FlatIR:
    x = lazy.Tensor(np.arange(6, dtype=np.float32).reshape(2, 3))
    quantized = [(x * float(i)).cast(lazy.float8).cast(lazy.float32) for i in range(1, 4)]
    return lazy.Trace([quantized[0] + quantized[1], lazy.softmax(quantized[2], -1)]).to_flat_ir()


def _run(flat: lazy.FlatIR, *data: np.ndarray) -> list[np.ndarray]:
    types = [[(t.shape, t.dtype) for t in tensors] for tensors in (flat.inputs, flat.outputs)]
    return pjrt.PJRT().compile(flat.to_stablehlo().bytecode, *types)(data)


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_gives_a_valid_program_that_computes_the_same_and_is_idempotent(name: str) -> None:
    flat, x = _program(), np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    before = str(flat)
    after = check_flat_ir(PASSES[name](flat))
    assert str(flat) == before
    check_flat_ir(flat)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(_run(flat, x), _run(after, x), strict=True))
    assert str(PASSES[name](after)) == str(after)


def test_what_a_pass_leaves_is_shared_not_copied() -> None:
    x = lazy.Tensor(np.zeros((5, 5), np.float32))
    flat = lazy.Trace([lazy.softmax(x @ x, -1)]).to_flat_ir()
    unchanged = constant_folding(flat)
    assert all(a is b for a, b in zip(flat.ops, unchanged.ops, strict=True))
    assert set(map(id, dead_code(flat).ops)) <= set(map(id, flat.ops))


def test_only_constants_are_merged_by_their_own_pass() -> None:
    x = lazy.Tensor([1.0, 2.0])
    flat = lazy.Trace([(x + 2.0) * (x + 2.0)]).to_flat_ir()
    assert _kinds(constant_deduplication(flat)).count("ConstantOp") == 1
    assert _kinds(constant_deduplication(flat)).count("AddOp") == 2
    assert _kinds(common_subexpression(flat)).count("AddOp") == 1


def test_constants_are_equal_bit_for_bit_in_their_dtype() -> None:
    nan = float("nan")
    values = [(0.0, lazy.float32), (-0.0, lazy.float32), (0.0, lazy.float64), (nan, lazy.float32), (-nan, lazy.float32), (1, lazy.int8)]
    outputs = [lazy.full((), value, of) for value, of in [*values, *values]]
    flat = lazy.Trace(outputs).to_flat_ir().run(constant_deduplication)
    assert len(flat.ops) == len(values)
    rounded = lazy.Trace([lazy.full((), 0.1, lazy.bfloat16), lazy.full((), 0.10009765625, lazy.bfloat16)]).to_flat_ir()
    assert len(constant_deduplication(rounded).ops) == 1


def test_attributes_are_frozen_by_value() -> None:
    assert frozen([1, [2.0, (3,)]]) == frozen((1, (2.0, [3])))
    assert frozen(0.0) != frozen(-0.0) and frozen(float("nan")) == frozen(float("nan"))
    assert frozen({"a": np.arange(3)}) == frozen({"a": np.arange(3)}) != frozen({"a": np.arange(3.0)})
    assert frozen(lazy.float32) is lazy.float32
    unknown = type("Unknown", (), {"__hash__": None})
    first, second = unknown(), unknown()
    assert frozen(first) == frozen(first) != frozen(second)


class ImpureOp(FlatIROp):
    """Something that happens, besides giving a result."""

    is_pure: ClassVar[bool] = False

    log: list[int] = field(default_factory=list)


del FLAT_OPS["ImpureOp"]


def test_what_has_an_effect_is_neither_merged_nor_dropped() -> None:
    given = FlatIRTensor((), lazy.float32, name="t0")
    outputs = [FlatIRTensor((), lazy.float32, name=f"t{i}") for i in (1, 2, 3)]
    ops = [ImpureOp([given], outputs[:1]), ImpureOp([given], outputs[1:2]), TanhOp([given], outputs[2:])]
    flat = check_flat_ir(lazy.FlatIR([given], ops, outputs[2:]).run(*PASSES.values()))
    assert _kinds(flat) == ["ImpureOp", "ImpureOp", "TanhOp"]


def test_folding_makes_one_constant_of_arithmetic_on_literals() -> None:
    flat = check_flat_ir(lazy.Trace([lazy.full((2,), 2.0) * 3.0 + 0.5]).to_flat_ir().run(*DEFAULT_PASSES))
    (op,) = flat.ops
    assert isinstance(op, ConstantOp) and op.data == [6.5, 6.5]
    assert str(op) == "t4: [shape=(2,), dtype=(float32), loc=(gpu:0)] = ConstantOp(data=[6.5, 6.5], dtype=float32, device=gpu:0)"


def test_a_program_that_is_wrong_is_not_folded_right() -> None:
    outputs = [FlatIRTensor((), of, name=name) for name, of in (("a", lazy.float32), ("b", lazy.float64), ("c", lazy.float32))]
    ops: list[FlatIROp] = [ConstantOp([], outputs[:1], 1.0, lazy.float32), ConstantOp([], outputs[1:2], 1.0, lazy.float64)]
    ops.append(FLAT_OPS["AddOp"](outputs[:2], outputs[2:]))
    assert _kinds(constant_folding(lazy.FlatIR([], ops, outputs[2:]))) == ["ConstantOp", "ConstantOp", "AddOp"]


def test_alike_lowerings_become_calls_of_one_function() -> None:
    flat = _program()
    called = check_flat_ir(function_deduplication(flat))
    (function,) = called.functions
    assert function.name == "cast_1" and len(function.ops) >= MIN_OPERATIONS
    assert _kinds(called).count("CallOp") == 3
    assert called.size < flat.size and len(called.ops) < called.size
    text = str(called)
    assert "function cast_1(arg0: [shape=(2, 3,), dtype=(float32), loc=(gpu:0)]):\n    t_inter" in text
    assert text.count("= CallOp(") == 3 and "callee=cast_1)" in text
    module = called.to_stablehlo().text
    assert module.count("func.func private @cast_1") == 1 and module.count("call @cast_1") == 3


def test_lowerings_that_differ_in_a_shape_or_an_attribute_are_other_functions() -> None:
    x, y = lazy.Tensor(np.zeros((2, 3), np.float32)), lazy.Tensor(np.zeros((3, 2), np.float32))
    outputs = [t.cast(of) for t in (x, y) for of in (lazy.float8, lazy.float8e5m2) for t in (t * 1.0, t * 2.0)]
    called = check_flat_ir(function_deduplication(lazy.Trace(outputs).to_flat_ir()))
    assert [function.name for function in called.functions] == [f"cast_{i}" for i in (1, 2, 3, 4)]
    assert _kinds(called).count("CallOp") == 8


def test_operations_that_differ_in_their_results_type_alone_are_not_merged() -> None:
    x = lazy.Tensor(np.arange(12, dtype=np.float32) / 8)
    row = x[:1]
    alike = [x.reshape((3, 4)), x.reshape((2, 6)), x.cast(lazy.float16), x.cast(lazy.bfloat16), row.expand((4,)), row.expand((5,))]
    flat = lazy.Trace(alike).to_flat_ir()
    merged = check_flat_ir(flat.run(common_subexpression))
    assert [(t.shape, t.dtype) for t in merged.outputs] == [(t.shape, t.dtype) for t in alike]


def test_alike_lowerings_whose_other_results_are_used_are_other_functions() -> None:
    x, y = lazy.Tensor([3.0, 1.0, 2.0]), lazy.Tensor([1.0, 7.0, 5.0])
    outputs = [x.topk(2, 0)[0], y.topk(2, 0)[1], (x + y).topk(2, 0)[0]]
    flat = check_flat_ir(lazy.Trace(outputs).to_flat_ir().run(function_deduplication))
    assert [len(f.outputs) for f in flat.functions] == [1] and [type(t.producer).__name__ for t in flat.outputs] == ["CallOp", "SliceOp", "CallOp"]


def test_equal_calls_are_merged_and_unused_ones_dropped() -> None:
    x = lazy.Tensor(np.zeros((2, 3), np.float32))
    flat = lazy.Trace([x.cast(lazy.float8), x.cast(lazy.float8), (x * 2.0).cast(lazy.float8)]).to_flat_ir()
    flat = lazy.FlatIR(flat.inputs, flat.ops, flat.outputs[:2])
    kept = check_flat_ir(flat.run(function_deduplication, *DEFAULT_PASSES))
    assert _kinds(kept) == ["CallOp"] and kept.outputs[0] is kept.outputs[1]


def test_a_run_reports_what_each_pass_did() -> None:
    x = lazy.Tensor([1.0, 2.0])
    y = (x + 2.0) * (x + 2.0)
    flat = lazy.Trace([y]).to_flat_ir().run(*DEFAULT_PASSES)
    assert [report.name for report in flat.report] == ["constant-folding", "common-subexpression", "dot-layout", "dead-code"]
    assert all(report.name in PASSES for report in flat.report)
    assert [(report.before, report.after) for report in flat.report] == [(7, 7), (7, 4), (4, 4), (4, 3)]
    assert str(flat.report[0]) == "constant-folding: 7 -> 7 operations\n    t_inter1 folded\n    t_inter2 folded"
    assert str(flat.report[1]) == (
        "common-subexpression: 7 -> 4 operations\n    t3 merged into t1\n    t_inter2 merged into t_inter1\n    t4 merged into t2"
    )


def test_the_report_names_what_dead_code_drops() -> None:
    x = lazy.Tensor([1.0, 2.0])
    flat = lazy.Trace([x.tanh(), x.exp()]).to_flat_ir()
    cut = lazy.FlatIR(flat.inputs, flat.ops, flat.outputs[:1]).run(dead_code)
    assert str(cut.report[0]) == "dead-code: 2 -> 1 operations\n    t2 dropped"


class PairOp(FlatIROp):
    """Two results of one operation."""

    def to_mlir(self, mlir: Any, operands: Sequence[Any]) -> Any:
        return [mlir.hlo.tanh(operands[0]), mlir.hlo.negate(operands[0])]


del FLAT_OPS["PairOp"]


def test_an_operation_may_have_several_results() -> None:
    given = FlatIRTensor((2,), lazy.float32, name="t0")
    outputs = [FlatIRTensor((2,), lazy.float32, name=f"t{i}") for i in (1, 2, 3, 4)]
    flat = lazy.FlatIR([given], [PairOp([given], outputs[:2]), PairOp([given], outputs[2:])], outputs[1:])
    flat = check_flat_ir(flat.run(*DEFAULT_PASSES))
    assert _kinds(flat) == ["PairOp"]
    assert next(r.tolist() for r in _run(flat, np.array([1.0, -2.0], np.float32))) == [-1, 2]


def test_a_large_program_is_lowered_in_a_few_passes_over_its_operations() -> None:
    x = lazy.Tensor(np.zeros((2, 3), np.float32))
    for _ in range(1500):
        x = (x + 1.0) * (x + 1.0)
    flat = lazy.Trace([x]).to_flat_ir()
    after = flat.run(*DEFAULT_PASSES)
    assert len(flat.ops) == 10500 and len(after.ops) == 1 + 2 * 1500


_PRODUCTS = {
    "as it should lie": ((64, 48), (48, 32), ((1,), (0,)), ((), ())),
    "left transposed": ((48, 64), (48, 32), ((0,), (0,)), ((), ())),
    "batches behind": ((48, 64, 3), (3, 48, 32), ((0,), (1,)), ((2,), (0,))),
    "two contracted": ((6, 64, 8), (8, 32, 6), ((2, 0), (0, 2)), ((), ())),
    "two left": ((4, 48, 16), (48, 32), ((1,), (0,)), ((), ())),
    "two on the right": ((64, 48), (48, 4, 8), ((1,), (0,)), ((), ())),
    "none left": ((3, 48), (48, 600, 3), ((1,), (0,)), ((0,), (2,))),
}


def _dot_program(name: str, transposed: bool) -> tuple[lazy.FlatIR, list[np.ndarray]]:
    """The product ``name`` of two inputs, or of the transposes of two."""
    left, right, contracting, batch = _PRODUCTS[name]
    rng = np.random.default_rng(0)
    arrays = [np.asarray(rng.integers(-4, 5, shape), np.float32) for shape in (left, right)]
    if transposed:
        arrays = [np.ascontiguousarray(a.T) for a in arrays]
    tensors = [lazy.Tensor(a) for a in arrays]
    operands = [lazy.permute(t, tuple(reversed(range(t.ndim)))) if transposed else t for t in tensors]
    return lazy.Trace([lazy.dot_general(*operands, contracting, batch)]).to_flat_ir(), arrays


@pytest.mark.parametrize("transposed", [False, True], ids=["itself", "transpose"])
@pytest.mark.parametrize("name", _PRODUCTS)
def test_the_left_operand_of_a_product_is_laid_out_for_its_kernel(name: str, transposed: bool) -> None:
    flat, arrays = _dot_program(name, transposed)
    after = check_flat_ir(flat.run(dot_layout, dead_code))
    assert _run(flat, *arrays)[0].tobytes() == _run(after, *arrays)[0].tobytes()  # sums of small integers are exact
    (dot,) = (op for op in after.ops if isinstance(op, DotOp))
    rank = len(dot.inputs[0].shape)
    if rank > len(dot.batch[0]) + len(dot.contracting[0]):
        assert list(dot.batch[0]) == list(range(len(dot.batch[0])))
        assert list(dot.contracting[0]) == list(range(rank - len(dot.contracting[0]), rank))
    assert not isinstance(dot.inputs[0].producer, TransposeOp)
    assert isinstance(dot.inputs[1].producer, TransposeOp) == (transposed and name == "two on the right")  # its order is the result's
    assert str(check_flat_ir(dot_layout(after))) == str(after)


def test_a_product_that_is_laid_out_well_or_small_is_left() -> None:
    flat, _ = _dot_program("as it should lie", False)
    assert dot_layout(flat).ops == flat.ops
    x = lazy.Tensor(np.zeros((4, 3), np.float32))
    small = lazy.Trace([lazy.dot_general(x, x, ((0,), (0,)))]).to_flat_ir()
    assert dot_layout(small).ops == small.ops


def test_the_report_names_what_a_product_multiplies_now() -> None:
    flat, _ = _dot_program("left transposed", False)
    (report,) = flat.run(dot_layout).report
    assert str(report) == "dot-layout: 1 -> 4 operations\n    t2 multiplies t2_left2, t1"
