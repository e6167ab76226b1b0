"""Each registered fusion is interchangeable with its unfused sequence, types included; and the proof notices one that is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ops_interchange import MODES, PARTS, Case, Mode, calls_of, cases, contexts_after, modes_of, prove, prove_asked, prove_calls

from fusible import nvte
from fusible.fusions import register_fusion_backward, register_fusion_forward, register_fusion_inference, unregister_fusion
from fusible.nvte import DType
from fusible.ops import GELU, MMT, Add, Context, SiLU

pytestmark = pytest.mark.usefixtures("alone")

ALL = [pytest.param(case, id=case.name) for case in cases()]
IN_MODES = [pytest.param(case, mode, id=f"{case.name}-{mode.name}") for case in cases() for mode in modes_of(case)]
BY_NAME = {mode.name: mode for mode in MODES}


@pytest.mark.parametrize(("case", "mode"), IN_MODES)
def test_fused_equals_unfused(case: Case, mode: Mode) -> None:
    assert prove(case, mode)


@pytest.mark.parametrize("mode", ["bf16", "delayed"])
@pytest.mark.parametrize("case", ALL)
def test_fused_equals_unfused_whatever_types_its_ops_ask_for(case: Case, mode: str) -> None:
    """Or it is not taken for such types: a product keeps what is inside of it in high precision."""
    assert all(prove_asked(case, BY_NAME[mode], between) for between in (False, True))


@pytest.mark.parametrize("case", ALL)
def test_a_fused_pass_computes_no_more_than_its_ops(case: Case) -> None:
    """Whichever gradients are wanted, and whichever operands are in 8 bits."""
    for mode in ("bf16", "current", "current but for the weight"):
        prove_calls(case, BY_NAME[mode])


CALLED_IN = {"bf16": False, "current": True, **{mode.name: True for mode in PARTS}}
"""Of each mode, whether between products."""
CALLED = [pytest.param(case, mode.name, id=f"{case.name}-{mode.name}") for case in cases() for mode in modes_of(case) if mode.name in CALLED_IN]
CALLS = dict(line.rsplit(": ", 1) for line in Path(__file__).with_name("fusion_calls.txt").read_text().splitlines())
"""What each fused pass calls: alone in bf16, and between products in 8 bits, of all of their operands or of some. That it computes the same is not
all that it is for."""


@pytest.mark.parametrize(("case", "mode"), CALLED)
def test_a_fused_pass_makes_the_calls_that_it_is_made_for(case: Case, mode: str) -> None:
    assert " ".join(calls_of(case, BY_NAME[mode], CALLED_IN[mode])) == CALLS[f"{case.name} {mode}"]


READ_BY_THE_PRODUCT = [case for case in cases() if case.fusion.name in ("gelu_mmt_bwd_fused", "add_gelu_mmt_add_bwd_fused")]


@pytest.mark.parametrize("case", READ_BY_THE_PRODUCT, ids=lambda case: case.name)
def test_the_input_of_a_gelu_goes_with_the_call_that_reads_it(case: Case) -> None:
    """It is the widest tensor of a block, and the product of the weight's gradient is yet to come."""
    contexts = contexts_after(case, BY_NAME["current"])
    assert [sorted(ctx) for ctx, type_ in zip(contexts, case.types, strict=True) if type_ is GELU] == [[]]


def test_every_line_of_calls_is_of_a_fusion() -> None:
    assert set(CALLS) == {f"{case.name} {mode.name}" for case in cases() for mode in modes_of(case) if mode.name in CALLED_IN}


@contextmanager
def planted(register: Callable[[Any], Any], function: Any) -> Iterator[Case]:
    """A fusion that is registered for a moment: the case that ``cases`` makes of it."""
    register(function)
    try:
        (case,) = [case for case in cases() if case.fusion.function is function]
        yield case
    finally:
        unregister_fusion(function)


def rejected(case: Case, modes: tuple[str, ...], why: str) -> None:
    for name in modes:
        with pytest.raises(AssertionError, match=why):
            prove(case, BY_NAME[name])


EVERY = tuple(BY_NAME)


def test_a_right_fusion_is_accepted() -> None:
    def right(mmt: MMT, silu: SiLU, x: nvte.Tensor) -> nvte.Tensor:
        return silu.inference(mmt.inference(x))

    with planted(register_fusion_inference, right) as case:
        assert all(prove(case, mode) for mode in MODES)


def test_a_wrong_value_is_noticed() -> None:
    def forgets_the_bias(mmt: MMT, add: Add, x: nvte.Tensor) -> nvte.Tensor:
        return nvte.matmul_transpose(*mmt.operands(x), add.y_dtype)

    with planted(register_fusion_inference, forgets_the_bias) as case:
        rejected(case, EVERY, "bound|step|differ")


def test_a_slightly_wrong_value_is_noticed() -> None:
    def another_gelu(add: Add, gelu: GELU, x: nvte.Tensor) -> nvte.Tensor:
        return nvte.qgelu(add.inference(x), gelu.y_dtype)

    with planted(register_fusion_inference, another_gelu) as case:
        rejected(case, ("fp32",), "bound")


def test_a_type_that_is_not_the_asked_one_is_noticed() -> None:
    def always_fp32(mmt: MMT, add: Add, x: nvte.Tensor) -> nvte.Tensor:
        return nvte.matmul_transpose_add(*mmt.operands(x), add.bias, DType.Float32)

    with planted(register_fusion_inference, always_fp32) as case:
        rejected(case, ("bf16", "delayed", "current"), "y: fp32 instead of bf16")


def test_a_type_that_is_a_lie_is_noticed() -> None:
    def says_otherwise(mmt: MMT, add: Add, x: nvte.Tensor) -> nvte.Tensor:
        y = nvte.matmul_transpose_add(*mmt.operands(x), add.bias, DType.Float32)
        return nvte.Tensor(y.data, add.y_dtype)

    with planted(register_fusion_inference, says_otherwise) as case:
        rejected(case, ("bf16", "delayed", "current"), "says bf16, holds fp32")


def test_a_missing_context_is_noticed() -> None:
    def saves_nothing(mmt: MMT, silu: SiLU, x: nvte.Tensor) -> tuple[nvte.Tensor, tuple[Context, Context]]:
        y, ctx = mmt.forward(x)
        return silu.inference(y), (ctx, {})

    with planted(register_fusion_forward, saves_nothing) as case:
        rejected(case, EVERY, "context 1 lacks")


def test_an_operand_saved_unquantized_is_noticed() -> None:
    def saves_the_weight_itself(mmt: MMT, silu: SiLU, x: nvte.Tensor) -> tuple[nvte.Tensor, tuple[Context, Context]]:
        y, ctx = mmt.forward(x)
        kept = {**ctx, "weight": mmt.weight} if "weight" in ctx else ctx
        return silu.inference(y), (kept, {"x": y})

    with planted(register_fusion_forward, saves_the_weight_itself) as case:
        rejected(case, ("delayed", "current", "bf16 on fp32 weights"), "context 0 weight: fp32 instead of")


def test_a_gradient_of_another_type_is_noticed() -> None:
    def halves(mmt: MMT, add: Add, mmt_ctx: Context, add_ctx: Context, dy: nvte.Tensor) -> Any:
        d, add_grads = add.backward(add_ctx, dy)
        assert d is not None
        dx, mmt_grads = mmt.backward(mmt_ctx, d)
        return dx, (mmt_grads, [None if g is None else nvte.cast(g, DType.Float16) for g in add_grads])

    with planted(register_fusion_backward, halves) as case:
        rejected(case, ("fp32", "bf16", "delayed"), "dbias of op 1: fp16 instead of")


def test_gradients_in_another_order_are_noticed() -> None:
    def reversed_gradients(mmt: MMT, add: Add, mmt_ctx: Context, add_ctx: Context, dy: nvte.Tensor) -> Any:
        d, add_grads = add.backward(add_ctx, dy)
        assert d is not None
        dx, mmt_grads = mmt.backward(mmt_ctx, d)
        return dx, (add_grads, mmt_grads)

    with planted(register_fusion_backward, reversed_gradients) as case:
        rejected(case, EVERY, "missing|shape")


def test_an_amax_that_is_not_observed_is_noticed() -> None:
    def uses_current_scaling(mmt: MMT, silu: SiLU, x: nvte.Tensor) -> nvte.Tensor:
        weight = nvte.cast(mmt.weight, DType.Float8E4M3)
        return silu.inference(nvte.matmul_transpose(nvte.cast_checked(x, mmt.x_dtype), weight, mmt.y_dtype))

    with planted(register_fusion_inference, uses_current_scaling) as case:
        rejected(case, ("delayed",), "observed")
