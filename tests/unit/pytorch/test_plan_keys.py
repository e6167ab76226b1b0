"""What makes another plan, and what does not: a plan is known by all that it depends on, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fusible
from fusible import nvte, tex
from fusible.fusions import register_fusion_inference, unregister_fusion
from fusible.ops import GELU, ReLU
from fusible.pytorch import ops
from fusible.pytorch.engine.call_inputs import draw_seed
from fusible.quantized import MXFP8Quantizer, NVFP4Quantizer
from fusible.tex import DType

WIDTH = 32


class Called:
    """A model of operations that take any width, and of a bias; what it is called with, and how."""

    def __init__(self) -> None:
        self.bias = ops.Bias(WIDTH)
        self.model = ops.Sequential(ops.GELU(), ops.AddExtraInput(), self.bias, ops.Dropout(0.0))
        self.x, self.extra = torch.ones(8, WIDTH), torch.ones(8, WIDTH)
        self.recipe: Any = None
        self.grad = True

    def call(self) -> Any:
        with fusible.autocast(enabled=self.recipe is not None, recipe=self.recipe), torch.set_grad_enabled(self.grad):
            self.model(self.x, self.extra)

    @property
    def built(self) -> int:
        return sum(part.pipeline.plans_built for part in self.model._arranged())


def _fused(relu: ReLU, gelu: GELU, x: nvte.Tensor) -> nvte.Tensor:
    raise NotImplementedError


def _registered(called: Called) -> None:
    register_fusion_inference(_fused)
    unregister_fusion(_fused)


CHANGES: dict[str, tuple[Callable[[Called], Any], bool, bool]] = {
    "the rows": (lambda c: vars(c).update(x=c.x[:4], extra=c.extra[:4]), False, False),
    "a recipe": (lambda c: vars(c).update(recipe=fusible.Float8CurrentScaling()), True, True),
    "the dtype of x": (lambda c: vars(c).update(x=c.x.bfloat16()), True, True),
    "the dtype of a parameter": (lambda c: c.bias.bfloat16(), True, True),
    "the gradient of x": (lambda c: c.x.requires_grad_(), True, False),
    "the gradient of an extra input": (lambda c: c.extra.requires_grad_(), True, False),
    "the gradient of a parameter": (lambda c: (c.x.requires_grad_(), c.bias.requires_grad_(False)), True, False),
    "a parameter's values": (lambda c: nn.init.ones_(c.bias.bias), False, False),
    "another parameter": (lambda c: setattr(c.bias, "bias", nn.Parameter(torch.ones(WIDTH))), False, False),
    "the mode of one module": (lambda c: c.model[3].eval(), True, True),
    "the registered fusions": (_registered, True, True),
    "an equal recipe": (lambda c: vars(c).update(recipe=None), False, False),
}
"""What is changed, and whether another plan is made for it: of a call with gradients, and of one without."""


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", CHANGES)
def test_another_plan_is_made_where_it_would_be_another_one(name: str, grad: bool) -> None:
    change, *another = CHANGES[name]
    called = Called()
    called.grad = grad
    called.call()
    called.call()
    assert called.built == 1
    change(called)
    called.call()
    called.call()
    assert called.built == 1 + another[not grad]


def test_no_gradient_is_computed_for_an_extra_input_that_wants_none() -> None:
    """The product before it is then by the weight's gradient alone."""
    model = ops.Sequential(ops.AddExtraInput(), ops.BasicLinear(WIDTH, WIDTH))
    x, extra, products = torch.ones(8, WIDTH), torch.ones(8, WIDTH), []
    for wanted in (False, True):
        y = model(x, extra.requires_grad_(wanted))
        with tex.record() as calls:
            y.sum().backward()
        products.append(sum("gemm" in call.function for call in calls))
        assert (extra.grad is not None) is wanted
    assert products == [1, 2]


@pytest.mark.parametrize("width", [WIDTH, 2 * WIDTH])
def test_widths_have_plans_of_their_own(width: int) -> None:
    model = ops.Sequential(ops.GELU(), ops.ReLU())
    for columns in (WIDTH, width):
        model(torch.ones(4, columns))
    (fuser,) = model._arranged()
    assert fuser.pipeline.plans_built == 1 + (width != WIDTH)


def test_without_gradients_trainable_weights_have_no_copies_by_columns() -> None:
    """Nothing but a backward reads them."""
    layer, x = fusible.Linear(64, 64), torch.randn(32, 64)
    usages = []
    for grad, trainable in ((False, True), (False, False), (True, True)):
        layer.requires_grad_(trainable)
        with fusible.autocast(recipe=fusible.MXFP8BlockScaling()), torch.set_grad_enabled(grad):
            layer(x.requires_grad_(grad))
        (plan, *_) = [plan for plan in layer._runner()._plans.values() if plan.request.args[0][0][1] == (grad and trainable)][-1:]
        usages.append((plan.quantized_args[0].type.rowwise, plan.quantized_args[0].type.columnwise))
    assert usages == [(True, False), (True, False), (True, True)]


def test_a_weight_that_is_held_in_another_format_has_another_plan() -> None:
    """Of the same nominal dtype: it is put in the place of the former one between two calls."""
    torch.manual_seed(0)
    model, x = fusible.Linear(64, 64), torch.randn(8, 64)
    values, formats = model.weight.detach().clone(), (MXFP8Quantizer(DType.kFloat8E4M3), NVFP4Quantizer(), MXFP8Quantizer(DType.kFloat8E5M2))
    for quantizer in (*formats, *formats):
        model.weight = nn.Parameter(quantizer(values), requires_grad=False)
        with torch.no_grad():
            y = model(x)
        wanted = torch.nn.functional.linear(x, model.weight.dequantize(), model.bias)
        torch.testing.assert_close(y, wanted, rtol=0, atol=64 * torch.finfo(torch.float32).eps * 8)


def test_what_is_drawn_for_a_call_is_any_of_many_numbers() -> None:
    """Of 2^62: calls with the same would drop the same elements."""
    torch.manual_seed(7)
    drawn = torch.cat([draw_seed(torch.device("cpu")) for _ in range(200)])
    assert drawn.dtype is torch.int64 and len(set(drawn.tolist())) == 200 and drawn.min() >= 0
    # The bits below the 62nd are each 0 and 1 some times: that one is not, of 200, has a chance of 2^-199.
    assert all(0 < ((drawn >> bit) & 1).sum() < 200 for bit in range(62)) and not (drawn >> 62).any()
    torch.manual_seed(7)
    assert torch.equal(draw_seed(torch.device("cpu")), drawn[:1])


class _CallsInBackward(torch.autograd.Function):
    """A function whose backward calls a module, as one that computes its forward anew does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: nn.Module) -> torch.Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.model(dy), None


@pytest.mark.parametrize("recipe", [None, fusible.Float8CurrentScaling()], ids=str)
@pytest.mark.parametrize("called", [False, True], ids=["new", "called before"])
def test_a_module_that_is_called_within_a_backward_takes_the_recipe_of_its_latest_call(called: bool, recipe: Any) -> None:
    """Where that has none of its own: it may repeat that call. A module without any call before has none."""
    torch.manual_seed(1)
    model, x = fusible.Linear(WIDTH, WIDTH), torch.randn(16, WIDTH, requires_grad=True)
    dy = torch.randn(16, WIDTH)
    with torch.no_grad():
        wanted = model(dy)
        if called:
            with fusible.autocast(enabled=recipe is not None, recipe=recipe):
                wanted = model(dy)
    fresh = fusible.Linear(WIDTH, WIDTH)
    fresh.load_state_dict({name: value for name, value in model.state_dict().items() if "scaling" not in name})
    _CallsInBackward.apply(x, model if called else fresh).backward(dy)
    assert torch.equal(x.grad, wanted)  # type: ignore[arg-type]
