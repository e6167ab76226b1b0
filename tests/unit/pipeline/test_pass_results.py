"""What the passes of an op return is looked at where they return: each mistake has its sentence, which names the op and the pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusible
from fusible import nvte
from fusible.errors import ArgumentError, DTypeError, ShapeError
from fusible.fusions import register_fusion_backward, register_fusion_forward, unregister_fusion
from fusible.nvte import DType, Tensor, make_nvte_tensor
from fusible.ops import Context, Op, ReLU

Pass = Callable[..., Any]


class Mistaken(Op):
    """``y = x * weight``, but for the passes that it is given."""

    def __init__(self, weight: Tensor, **passes: Pass) -> None:
        super().__init__()
        self.weight, self.passes = weight, passes

    @property
    def args(self) -> list[Tensor]:
        return [self.weight]

    def forward(self, x: Tensor) -> Any:
        y = nvte.cast(x, self.y_dtype)
        return self.passes["forward"](y) if "forward" in self.passes else (y, {"x": x})

    def backward(self, ctx: Any, dy: Tensor) -> Any:
        dx, dweight = nvte.cast(dy, self.dx_dtype), nvte.dbias(dy, DType.Float32)
        return self.passes["backward"](dx, dweight) if "backward" in self.passes else (dx, [dweight])

    def inference(self, x: Tensor, **values: Any) -> Any:
        y = nvte.cast(x, self.y_dtype)
        return self.passes["inference"](y) if "inference" in self.passes else y


class Module(fusible.BaseModule):
    def __init__(self, **passes: Pass) -> None:
        torch.nn.Module.__init__(self)
        self.weight = torch.nn.Parameter(torch.ones(4))
        super().__init__(Mistaken(make_nvte_tensor(self.weight), **passes))


def raw(x: Tensor) -> torch.Tensor:
    return x.data  # type: ignore[no-any-return]


MISTAKES: dict[str, tuple[str, Pass, type[Exception], str]] = {
    "y alone": (
        "forward",
        lambda y: y,
        ArgumentError,
        r"what forward of Mistaken returns of .*: expected \(y, context\), got a Tensor; return these as a",
    ),
    "both in a list": ("forward", lambda y: [y, {}], ArgumentError, r"expected \(y, context\), got a list of 2"),
    "one in a tuple": ("forward", lambda y: (y,), ArgumentError, r"expected \(y, context\), got a tuple of 1"),
    "a fourth": ("forward", lambda y: (y, {}, {}, {}), ArgumentError, r"expected \(y, context\), got a tuple of 4"),
    "a third": ("forward", lambda y: (y, {}, {"a": y}), ArgumentError, r"expected \(y, context\), got a tuple of 3"),
    "another tensor": ("forward", lambda y: (raw(y), {}), ArgumentError, "expected an nvte.Tensor as y, got a Tensor; return what an nvte function"),
    "no tensor": ("forward", lambda y: (None, {}), ArgumentError, "expected an nvte.Tensor as y, got None"),
    "another type": (
        "forward",
        lambda y: (nvte.cast(y, DType.Float16), {}),
        DTypeError,
        "y that forward of .*: expected Float32, got Float16; .*y_dtype",
    ),
    "no context": ("forward", lambda y: (y, None), ArgumentError, "expected a dictionary as context, got None; return {} where"),
    "a number in it": (
        "forward",
        lambda y: (y, {"a": 3}),
        ArgumentError,
        "expected a context of nvte.Tensors by names, got 3; keep what is no tensor",
    ),
    "a name of none": ("forward", lambda y: (y, {1: y}), ArgumentError, "expected a context of nvte.Tensors by names, got 1"),
    "y as a pair": (
        "inference",
        lambda y: (y, {}),
        ArgumentError,
        "what inference of Mistaken returns of .*: expected an nvte.Tensor as y, got a tuple of 2",
    ),
    "y of another type": (
        "inference",
        lambda y: nvte.cast(y, DType.Float16),
        DTypeError,
        "y that inference of Mistaken returns of .*: expected Float32, got",
    ),
    "dx alone": ("backward", lambda dx, dw: dx, ArgumentError, r"what backward of Mistaken returns: expected \(dx, gradients\), got a Tensor"),
    "dx in a tuple": ("backward", lambda dx, dw: (dx,), ArgumentError, r"expected \(dx, gradients\), got a tuple of 1"),
    "no dx": ("backward", lambda dx, dw: (None, [dw]), ArgumentError, "expected an nvte.Tensor as dx, got None; return the gradient of x, which is"),
    "dx of torch": ("backward", lambda dx, dw: (raw(dx), [dw]), ArgumentError, "expected an nvte.Tensor as dx, got a Tensor; return what an nvte"),
    "dx of another type": ("backward", lambda dx, dw: (nvte.cast(dx, DType.Float16), [dw]), DTypeError, "dx that backward of .*expected Float32"),
    "no list": ("backward", lambda dx, dw: (dx, dw), ArgumentError, "expected 1 gradients, got a Tensor; return one for each of weight"),
    "too many": ("backward", lambda dx, dw: (dx, [dw, dw]), ArgumentError, "expected 1 gradients, got a list of 2; return one for each of weight"),
    "none": ("backward", lambda dx, dw: (dx, [None]), ArgumentError, "expected the gradient of weight, got None; return it, as it is wanted, or"),
    "of torch": ("backward", lambda dx, dw: (dx, [raw(dw)]), ArgumentError, "expected an nvte.Tensor as gradient of weight, got a Tensor"),
    "of dx's shape": (
        "backward",
        lambda dx, dw: (dx, [dx]),
        ShapeError,
        r"gradient of weight that backward of .*: expected \[4\], got \[3, 4\]; sum over",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_where_it_is_made(mistake: str) -> None:
    name, wrong, error, message = MISTAKES[mistake]
    model = fusible.Sequential(fusible.Linear(4, 4), Module(**{name: wrong}))
    x = torch.randn(3, 4)
    with pytest.raises(error, match=message) as caught:
        if name == "inference":
            with torch.no_grad():
                model(x)
        else:
            model(x).sum().backward()
    assert "\n" not in str(caught.value).partition("\n\n")[0]


def test_what_is_right_is_taken() -> None:
    """And so is a gradient that nobody wants and nobody gives."""
    model = fusible.Sequential(Module(backward=lambda dx, dw: (None, [dw])))
    model(torch.randn(3, 4)).sum().backward()
    frozen = fusible.Sequential(fusible.Linear(4, 4), Module(backward=lambda dx, dw: (dx, [None])))
    frozen[1].weight.requires_grad_(False)
    frozen(torch.randn(3, 4)).sum().backward()
    assert frozen[0].weight.grad is not None and frozen[1].weight.grad is None


def test_a_gradient_that_a_pass_has_added_to_a_sum_itself_is_not_missed() -> None:
    """Where there is none to add it to, it is (``none`` above)."""

    def adds(dx: Tensor, dw: Tensor) -> Any:
        so_far = nvte.current_pass().sums.get("0.weight")
        assert so_far is not None
        so_far.data.add_(dw.data)
        return dx, [None]

    module = Module(backward=adds)
    module.accumulating_parameters = ("weight",)
    model = fusible.Sequential(module)
    module.weight.main_grad = torch.ones(4)  # type: ignore[attr-defined]
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
    assert torch.equal(module.weight.main_grad, torch.full((4,), 7.0)) and module.weight.grad is None


class Sides(Op):
    """``y = x``, and x once more beside it, which ``Taker`` adds; but for the passes that it is given."""

    side_outputs = ("twin",)

    def __init__(self, **passes: Pass) -> None:
        super().__init__()
        self.passes = passes

    def forward(self, x: Tensor) -> Any:
        y = nvte.cast(x, self.y_dtype)
        return self.passes.get("forward", lambda y: (y, {}, {"twin": y}))(y)

    def backward(self, ctx: Any, dy: Tensor, **sides: Tensor | None) -> Any:
        return nvte.cast(dy, self.dx_dtype), []


class Taker(Op):
    side_inputs = ("twin",)

    def __init__(self, **passes: Pass) -> None:
        super().__init__()
        self.passes = passes

    def forward(self, x: Tensor, *, twin: Tensor) -> Any:
        return nvte.cast(x, self.y_dtype), {}

    def backward(self, ctx: Any, dy: Tensor) -> Any:
        dx = nvte.cast(dy, self.dx_dtype)
        return self.passes.get("backward", lambda dx: (dx, [], {"twin": None}))(dx)


SIDE_MISTAKES: dict[str, tuple[str, Pass, str]] = {
    "no side outputs": ("forward", lambda y: (y, {}), r"expected \(y, context, side outputs\), got a tuple of 2; return these as a tuple"),
    "side outputs in a list": ("forward", lambda y: (y, {}, [y]), "expected a dictionary of side outputs, got a list of 1; return one"),
    "no gradients of side inputs": ("backward", lambda dx: (dx, []), r"expected \(dx, gradients, gradients of side inputs\), got a tuple of 2"),
    "these in a list": ("backward", lambda dx: (dx, [], [dx]), "expected a dictionary of gradients of side inputs, got a list of 1; return one"),
}


def _with_sides(**passes: Pass) -> torch.nn.Module:
    modules = [torch.nn.Module.__new__(fusible.BaseModule) for _ in range(2)]
    for module, op in zip(modules, (Sides, Taker), strict=True):
        torch.nn.Module.__init__(module)
        fusible.BaseModule.__init__(module, op(**passes))
    return fusible.Sequential(fusible.Linear(4, 4), *modules)


@pytest.mark.parametrize("mistake", SIDE_MISTAKES)
def test_a_mistake_about_side_values_is_told_where_it_is_made(mistake: str) -> None:
    name, wrong, message = SIDE_MISTAKES[mistake]
    _with_sides()(torch.randn(3, 4)).sum().backward()
    with pytest.raises(ArgumentError, match=message):
        _with_sides(**{name: wrong})(torch.randn(3, 4)).sum().backward()


FUSED_MISTAKES: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "one context for two": (
        lambda y: (y, ({},)),
        ArgumentError,
        r"what forward of Mistaken \+ .* returns: expected 2 contexts, got a tuple of 1; return",
    ),
    "no contexts": (lambda y: y, ArgumentError, r"what forward of Mistaken \+ .* returns: expected \(y, contexts\), got a Tensor; return these"),
    "another type": (
        lambda y: (nvte.cast(y, DType.Float16), ({}, {})),
        DTypeError,
        r"y that forward of Mistaken \+ .*: expected Float32, got Float16",
    ),
}


@pytest.mark.parametrize("mistake", FUSED_MISTAKES)
def test_a_mistake_of_a_fusion_is_told_where_it_is_made(mistake: str) -> None:
    returned, error, message = FUSED_MISTAKES[mistake]

    def wrong(first: Mistaken, second: ReLU, x: Tensor) -> Any:
        return returned(nvte.cast(x, second.y_dtype))

    model = fusible.Sequential(Module(), fusible.ReLU())
    model(torch.randn(3, 4))
    register_fusion_forward(wrong)
    try:
        with pytest.raises(error, match=message):
            model(torch.randn(3, 4))
    finally:
        unregister_fusion(wrong)
    model(torch.randn(3, 4))


FUSED_BACKWARD_MISTAKES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "no lists": (
        lambda dx: (dx, None),
        r"what backward of Mistaken \+ .* returns: expected the gradients of 2 ops, got None; return a list for each",
    ),
    "one list": (lambda dx: (dx, ([],)), "expected the gradients of 2 ops, got a tuple of 1"),
    "a tensor": (lambda dx: (dx, dx), "expected the gradients of 2 ops, got a Tensor"),
}


@pytest.mark.parametrize("mistake", FUSED_BACKWARD_MISTAKES)
def test_a_mistake_of_a_fused_backward_is_told_where_it_is_made(mistake: str) -> None:
    returned, message = FUSED_BACKWARD_MISTAKES[mistake]

    def wrong(first: Mistaken, second: ReLU, first_ctx: Context, second_ctx: Context, dy: Tensor) -> Any:
        return returned(nvte.cast(dy, first.dx_dtype))

    model = fusible.Sequential(fusible.Linear(4, 4), Module(), fusible.ReLU())
    register_fusion_backward(wrong)
    try:
        with pytest.raises(ArgumentError, match=message):
            model(torch.randn(3, 4)).sum().backward()
    finally:
        unregister_fusion(wrong)
    model(torch.randn(3, 4)).sum().backward()
