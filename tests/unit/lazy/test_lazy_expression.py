"""Formulas of FlatIR tensors: the operations that they emit, in the order of their operands, and the reasons that these give."""

from __future__ import annotations

import pytest

from fusible import lazy
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.flat_ir.ops import AddOp, BroadcastOp, ConstantOp
from fusible.lazy.ops.lowering.expression import Expression, redirect, where


def _tensor(name: str, *shape: int, of: lazy.dtype = lazy.float32) -> FlatIRTensor:
    return FlatIRTensor(shape, of, name=name)


def _spelled(tensor: FlatIRTensor) -> str:
    """What computes a tensor, operands in their order; a literal by its value."""
    op = tensor.producer
    if op is None:
        return tensor.name
    if isinstance(op, ConstantOp):
        return repr(op.data)
    inner = [_spelled(t) for t in op.inputs]
    return inner[0] if isinstance(op, BroadcastOp) else f"{type(op).__name__}({', '.join(inner)})"


def test_a_formula_emits_its_operations_and_binds_the_last_to_the_output() -> None:
    x, out = _tensor("x", 2), _tensor("out", 2)
    (1 / (Expression(x, "test") * 2.5 - 1)).bind(out)
    assert _spelled(out) == "DivideOp(1, SubtractOp(MulOp(x, 2.5), 1))"
    assert out.producer is not None and {t.reason_details for t in out.producer.inputs} == {"test"} and out.reason_details is None


def test_operators_and_methods_emit_what_they_are_called() -> None:
    x = Expression(_tensor("x", 2), "test")
    i = Expression(_tensor("i", 2, of=lazy.uint64), "test")
    assert _spelled((-abs(x) + x.exp().log()).tensor) == "AddOp(NegateOp(AbsOp(x)), LogOp(ExpOp(x)))"
    assert _spelled((x.floor() * x.round() / x.cos()).tensor) == "DivideOp(MulOp(FloorOp(x), RoundNearestEvenOp(x)), CosineOp(x))"
    assert _spelled((2 - 3 * x.sqrt()).tensor) == "SubtractOp(2, MulOp(3, SqrtOp(x)))"
    assert _spelled((x.maximum(0.0).remainder(x)).tensor) == "RemainderOp(MaxOp(x, 0.0), x)"
    assert _spelled(((i >> 32) | (i << 32) & (i ^ 1)).tensor) == "OrOp(ShiftRightLogicalOp(i, 32), AndOp(ShiftLeftOp(i, 32), XorOp(i, 1)))"
    assert _spelled(x.clamp(-1.0, 1.0).to(lazy.int32).tensor) == "ConvertOp(ClampOp(-1.0, x, 1.0))"


@pytest.mark.parametrize(
    ("direction", "formula"),
    [("EQ", lambda a: a == 0), ("NE", lambda a: a != 0), ("LT", lambda a: a < 0), ("LE", lambda a: a <= 0), ("GE", lambda a: a >= 0)],
)
def test_comparisons_give_bools(direction: str, formula) -> None:  # type: ignore[no-untyped-def]
    found = formula(Expression(_tensor("x", 3), "test")).tensor
    assert found.dtype is lazy.bool and found.shape == (3,) and found.producer.attributes() == [f"direction={direction}"]


def test_a_choice_has_the_type_and_the_reason_of_what_is_chosen() -> None:
    x = Expression(_tensor("x", 3), "compare")
    chosen = where(x < 0, 7, Expression(_tensor("y", 3, of=lazy.int32), "choose"))
    assert (chosen.tensor.dtype, chosen.reason, chosen.tensor.reason_details) == (lazy.int32, "choose", "choose")


def test_a_scalar_is_broadcast_and_a_literal_may_have_a_reason_of_its_own() -> None:
    x = Expression(_tensor("x", 2, 3), "test")
    made = (x + _tensor("n")).tensor.producer
    assert [t.shape for t in made.inputs] == [(2, 3), (2, 3)]
    assert x.literal(1, "because of this").tensor.reason_details == "because of this"
    assert x.because("another").literal(1).reason == "another"


def test_only_a_result_of_the_same_type_takes_the_place_of_another() -> None:
    a, b, made = _tensor("a", 2), _tensor("b", 2), _tensor("", 2)
    AddOp([a, b], [made])
    with pytest.raises(AssertionError):
        redirect(made, _tensor("out", 3))
    with pytest.raises(AssertionError):
        redirect(a, _tensor("out", 2))
    out = _tensor("out", 2)
    redirect(made, out)
    assert out.producer is made.producer and out.producer.outputs == [out]
