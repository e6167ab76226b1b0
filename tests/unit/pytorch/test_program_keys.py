"""What passes between the regions of a pass is a part of the keys of its programs: an executor that keeps the first program of each key gives what a
model that has not been called before gives."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

import fusible
from fusible import nvte, tex
from fusible.errors import ArgumentError
from fusible.ops import Op
from fusible.pytorch import ops
from fusible.pytorch.engine import executors
from fusible.pytorch.engine.borders import packed
from fusible.pytorch.engine.executors import EagerExecutor, register_executor
from fusible.pytorch.engine.program import Program
from fusible.quantized import Float8BlockQuantizer, Float8CurrentScalingQuantizer, HybridQuantizer, MXFP8Quantizer
from fusible.tex import DType

WIDTH = 128
E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


class FirstOfItsKey:
    """Runs the first program that came with a key, and inputs of the same shapes and dtypes; it wants passes as whole programs, of plain tensors."""

    name, whole, in_place = "first", True, True

    def __init__(self) -> None:
        self._known: dict[Hashable, Program] = {}

    def __call__(self, key: Hashable, program: Program, inputs: list[Tensor]) -> tuple[list[Tensor], Any]:
        assert all(type(x) is Tensor or type(x) is torch.nn.Parameter for x in inputs)
        return self._known.setdefault((key, tuple((x.shape, x.dtype) for x in inputs)), program)(inputs)


class ReplaysWhole(EagerExecutor):
    whole = True


@pytest.fixture(params=[FirstOfItsKey, ReplaysWhole], autouse=True)
def first_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_EXECUTORS", dict(executors._EXECUTORS))
    register_executor("first", request.param)


def drawn(seed: int) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(model: Any, recipe: fusible.Recipe | None, of: Callable[[Tensor], Any] = lambda y: y.square().sum().backward()) -> list[Tensor]:
    """What a training call leaves: the output, and the gradients."""
    x = drawn(1).requires_grad_()
    model.zero_grad()
    with fusible.autocast(enabled=recipe is not None, recipe=recipe):
        result = model(x)
        of(result)
    assert x.grad is not None
    outputs = result if isinstance(result, tuple) else (result,)
    return [*(y.detach() for y in outputs), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check(first: str, then: str, calls: Callable[[], Callable[[str], list[Tensor]]]) -> None:
    """Whether after calls of one kind a call of another gives what it gives alone."""
    alone, call = calls()(then), calls()
    for _ in range(2):  # as it comes, listened to; what follows would be replayed
        call(first)
    assert all(map(torch.equal, call(then), alone))


def _hybrid(dy: Tensor, columns_alone: bool) -> Any:
    """A gradient with a copy of its own for each direction, the first of which holds its values transposed where ``columns_alone``."""
    quantizers = (Float8CurrentScalingQuantizer(dtype, device=dy.device) for dtype in (E4M3, E5M2))
    made = HybridQuantizer(**dict(zip(("rowwise_quantizer", "columnwise_quantizer"), quantizers, strict=True)))(dy)
    if columns_alone:
        made.rowwise_sub_storage.update_usage(rowwise_usage=False, columnwise_usage=True)
    return made


def _blocks(**options: Any) -> Callable[[Tensor], Any]:
    return Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1, **options)


def _swizzled(x: Any) -> Any:
    tex.swizzle_scales_for_gemm_(x)
    return x


GRADIENTS: dict[str, Callable[[Tensor], Any]] = {
    "as the recipe quantizes it": _blocks(),
    "with scales of other values": _blocks(force_pow_2_scales=False),
    "in high precision": lambda dy: dy,
    "with a copy for each direction": lambda dy: _hybrid(dy, False),
    "the same, transposed": lambda dy: _hybrid(dy, True),
    "in MXFP8": lambda dy: MXFP8Quantizer(E4M3)(dy),
    "in MXFP8, with scales in the order of tensor cores": lambda dy: _swizzled(MXFP8Quantizer(E4M3)(dy)),
}


@pytest.mark.parametrize(("first", "then"), list(permutations(GRADIENTS, 2)))
def test_a_gradient_is_taken_as_what_it_is_whatever_came_before(first: str, then: str) -> None:
    def calls() -> Callable[[str], list[Tensor]]:
        torch.manual_seed(0)
        model = fusible.Linear(WIDTH, WIDTH).compile("first")
        return lambda kind: step(model, fusible.Float8BlockScaling(), lambda y: y.backward(GRADIENTS[kind](drawn(2))))

    check(first, then, calls)


class HandsOver(ops.BasicOperation):
    """Twice x, quantized for the next operation, with the copies that ``copies`` names."""

    copies = ""

    def op_forward(self, ctx: Any, input_: Tensor, *, next_op_input_quantizer: Any, **_: Any) -> Any:
        if self.copies == "none":
            return 2 * input_
        y = next_op_input_quantizer(2 * input_)
        y.update_usage(rowwise_usage=self.copies != "by columns", columnwise_usage=self.copies != "by rows")
        return y

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        return 2 * ops.maybe_dequantize(grad_output, torch.float32), ()


@pytest.mark.parametrize(("first", "then"), list(permutations(["by rows", "by columns", "both", "none"], 2)))
def test_what_is_saved_of_an_operand_that_a_user_hands_over_is_taken_as_what_it_is(first: str, then: str) -> None:
    """Rows and columns of a square tensor are as many, and are others."""

    def calls() -> Callable[[str], list[Tensor]]:
        torch.manual_seed(0)
        user = HandsOver()
        model = ops.Sequential(user, ops.Linear(WIDTH, WIDTH)).compile("first")

        def call(copies: str) -> list[Tensor]:
            user.copies = copies
            return step(model, fusible.Float8CurrentScaling())

        return call

    check(first, then, calls)


class AddsTwo(ops.BasicOperation):
    """Adds two extra inputs; ``silent``: to which of them it gives no gradient."""

    num_extra_inputs = 2
    silent = ""

    def fuser_forward(self, basic_op_ctxs: Any, input_: Tensor, *, basic_op_extra_inputs: Any, **_: Any) -> Any:
        ((a, b),) = basic_op_extra_inputs
        return input_ + a + b, [()]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Tensor, **_: Any) -> Any:
        return grad_output, [()], [tuple(None if name in self.silent else grad_output.clone() for name in "ab")]


@pytest.mark.parametrize(("first", "then"), list(permutations(["none", "a", "b", "ab"], 2)))
def test_a_gradient_of_an_extra_input_that_is_missing_is_not_taken_for_another_one(first: str, then: str) -> None:
    def calls() -> Callable[[str], list[Tensor]]:
        made = [ops.MakeExtraOutput().set_extra_output_channel(0, name, output_to_caller=False) for name in "ab"]
        last = AddsTwo().set_extra_input_channel(0, "a").set_extra_input_channel(1, "b")
        model = ops.Sequential(made[0], ops.ConstantScale(3.0), made[1], last).compile("first")

        def call(silent: str) -> list[Tensor]:
            last.silent = "" if silent == "none" else silent
            result = step(model, None, lambda y: y.backward(torch.ones_like(y)))
            assert torch.equal(result[-1], torch.full_like(result[-1], 3 + ("a" not in last.silent) + 3 * ("b" not in last.silent)))
            return result

        return call

    check(first, then, calls)


class Spends(ops.BasicOperation):
    """Quantizes for the next operation, and hands on something else."""

    def op_forward(self, ctx: Any, input_: Tensor, *, next_op_input_quantizer: Any, **_: Any) -> Tensor:
        next_op_input_quantizer(input_)
        return 2 * input_

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        return 2 * ops.maybe_dequantize(grad_output, torch.float32), ()


def test_a_scale_that_quantizes_two_tensors_of_a_pass_is_refused_in_a_sentence() -> None:
    model = ops.Sequential(Spends(), ops.Linear(WIDTH, WIDTH)).compile("first")
    message = r"what is quantized by the scale '1\.x' in a pass of .*: expected one tensor, got another; hand on what was quantized, or"
    with pytest.raises(ArgumentError, match=message):
        step(model, fusible.DelayedScaling())


def test_a_name_is_registered_again_only_in_place_of_the_other() -> None:
    with pytest.raises(ArgumentError, match="register_executor: expected a new name, got 'first' again"):
        register_executor("first", EagerExecutor)
    register_executor("first", ReplaysWhole, replace=True)
    assert type(executors.make_executor("first")) is ReplaysWhole


class Halves(ops.BasicOperation):
    def op_forward(self, ctx: Any, input_: Tensor, **_: Any) -> Tensor:
        return ops.maybe_dequantize(input_, torch.float32) / 2

    def op_backward(self, ctx: Any, grad_output: Any) -> Any:
        return ops.maybe_dequantize(grad_output, torch.float32) / 2, ()


def test_of_residuals_that_a_program_takes_from_another_the_inner_one_is_added_first() -> None:
    """One's own code stands between where they begin and where they end."""

    def model() -> fusible.Sequential:
        torch.manual_seed(0)
        inner = fusible.Residual(fusible.Linear(WIDTH, WIDTH), Halves(), fusible.GELU())
        return fusible.Sequential(fusible.Residual(fusible.GELU(), inner, fusible.ReLU()))

    for found, wanted in zip(step(model().compile("first"), None), step(model(), None), strict=True):
        torch.testing.assert_close(found, wanted)


class Keeps(Op):
    """``y = x``; keeps x for backward under the name ``of``, which gives dy times 1 or 2 by it."""

    of = ["x"]

    def forward(self, x: nvte.Tensor) -> Any:
        return nvte.cast(x, self.y_dtype), {self.of[0]: x}

    def backward(self, ctx: Any, dy: nvte.Tensor) -> Any:
        dx = nvte.cast(dy, self.dx_dtype)
        return dx if "x" in ctx else nvte.add(dx, dx, self.dx_dtype), []


@pytest.mark.parametrize("first_programs", [FirstOfItsKey], indirect=True)  # a replay keeps what the forward that it listed has kept
@pytest.mark.parametrize(("first", "then"), [("x", "other"), ("other", "x")])
def test_by_what_names_a_forward_keeps_tensors_is_in_the_key_of_its_backward(first: str, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def calls() -> Callable[[str], list[Tensor]]:
        module = torch.nn.Module.__new__(fusible.BaseModule)
        torch.nn.Module.__init__(module)
        fusible.BaseModule.__init__(module, Keeps())
        model = fusible.Sequential(module, Halves()).compile("first")

        def call(name: str) -> list[Tensor]:
            monkeypatch.setattr(Keeps, "of", [name])
            return step(model, None)

        return call

    check(first, then, calls)


def test_tensors_behind_the_first_are_in_a_key_by_shape_and_dtype() -> None:
    value, side = (nvte.make_nvte_tensor(torch.ones(2, 4)) for _ in range(2))
    leaves, border = packed(value, [("a", side)])
    key = border.key(leaves)
    assert key == border.key([*leaves])
    assert all(key != border.key([leaves[0], other]) for other in (leaves[1].bfloat16(), leaves[1][:1]))
