"""Functions that fuse operations, as users register them: what they may return, what they are handed, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import fusible
from fusible.errors import ArgumentError
from fusible.pytorch import ops
from fusible.pytorch.ops import FusedOperation, FusibleOperation

REGISTER = {
    "forward": ops.register_forward_fusion,
    "backward": ops.register_backward_fusion,
    "forward_backward": ops.register_forward_backward_fusion,
}
X = torch.linspace(-1, 1, 32).view(4, 8)


class Both(FusedOperation):
    """Stands for its parts in both passes."""

    def fuser_forward(self, basic_op_ctxs: Any, input_: Any, **_: Any) -> Any:
        return torch.full_like(input_, 7.0), [() for _ in basic_op_ctxs]

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **_: Any) -> Any:
        return 3 * grad_output, [() for _ in basic_op_ctxs], [() for _ in basic_op_ctxs]


Ops = Sequence[FusibleOperation]
RIGHT: dict[str, Callable[[Ops], Ops]] = {
    "as they were": lambda given: given,
    "another list": lambda given: tuple(given),
    "the first two together": lambda given: [Both(list(given[:2])), *given[2:]],
    "the last alone": lambda given: [*given[:-1], Both([given[-1]])],
    "all together": lambda given: [Both(list(given))],
}
WRONG: dict[str, Callable[[Ops], Ops]] = {
    "none": lambda given: [],
    "one too few": lambda given: given[:-1],
    "one twice": lambda given: [*given, given[-1]],
    "another at the end": lambda given: [*given, ops.GELU()],
    "another in a place": lambda given: [*given[:-1], ops.ReLU()],
    "two exchanged": lambda given: [given[1], given[0], *given[2:]],
    "one together, and left where it was": lambda given: [Both([given[0]]), *given],
    "two together in the other order": lambda given: [Both([given[1], given[0]]), *given[2:]],
    "one left out of those together": lambda given: [Both([given[0]]), *given[2:]],
}


def stack() -> ops.Sequential:
    """Operations that leave nothing for their backward: any pass of them can be another's."""
    return ops.Sequential(ops.ConstantScale(2.0), ops.Identity(), ops.ConstantScale(5.0))


def step(model: ops.Sequential) -> list[torch.Tensor]:
    x = X.clone().requires_grad_()
    y = model(x)
    y.sum().backward()
    return [y.detach(), x.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("name", WRONG)
def test_a_function_that_returns_other_operations_is_refused(kind: str, name: str) -> None:
    """All of the basic operations, in their order, and no others: whatever they are put together in. Nothing is left of it when it is taken back."""

    def fuse(given: Ops, *, recipe: Any) -> Ops:
        return WRONG[name](given)

    model, wanted = stack(), step(stack())
    with REGISTER[kind](fuse):  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(ArgumentError) as raised:
                model(X)
            assert str(raised.value) == (
                "what the fusion test_a_function_that_returns_other_operations_is_refused.<locals>.fuse returns of "
                "ConstantScale -> Identity -> ConstantScale: expected the basic operations that it was given, in their order, "
                "got others; put operations together, and leave none out."
            )
    assert all(torch.equal(a, b) for a, b in zip(step(model), wanted, strict=True))


@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("name", RIGHT)
def test_a_function_that_puts_operations_together_is_taken_by_its_word(kind: str, name: str) -> None:
    seen: list[tuple[list[str], Any]] = []

    def fuse(given: Ops, *, recipe: Any) -> Ops:
        seen.append(([type(op).__name__ for op in given], recipe))
        return RIGHT[name](given)

    model = stack()
    start, stop = {"the first two together": (0, 2), "the last alone": (2, 3), "all together": (0, 3)}.get(name, (0, 0))
    with REGISTER[kind](fuse):  # type: ignore[arg-type]
        lines = model.explain().splitlines()
        found = step(model)
        assert seen and all(row == (["ConstantScale", "Identity", "ConstantScale"], None) for row in seen)
        with fusible.autocast(recipe=fusible.Float8CurrentScaling()):
            model(X)
        assert seen[-1][1] == fusible.Float8CurrentScaling()
    places = f"{start}-{stop - 1}" if stop > start + 1 else f"{start}"
    assert f"  {kind}: fuse: " + (f"Both at {places}" if stop else "nothing among ConstantScale, Identity, ConstantScale") in lines
    wanted, factor = X, 1.0
    for place, scale in enumerate((2.0, 1.0, 5.0)):
        inside = start <= place < stop
        wanted = torch.full_like(X, 7.0) if inside and kind != "backward" else scale * wanted
        factor *= (3.0 if place == start else 1.0) if inside and kind != "forward" else scale
    assert torch.equal(found[0], wanted) and torch.equal(found[1], torch.full_like(X, factor))
    assert torch.equal(step(model)[0], 10 * X)


@pytest.mark.parametrize("kind", REGISTER)
def test_a_function_is_handed_the_parts_of_an_operation_that_has_no_pass_of_its_own(kind: str) -> None:
    """One that has a pass of its own is handed over as it is, as it stands for its parts."""
    seen: list[list[str]] = []

    def look(given: Ops, *, recipe: Any) -> Ops:
        seen.append([type(op).__name__ for op in given])
        return given

    with REGISTER[kind](look):  # type: ignore[arg-type]
        ops.Sequential(ops.Linear(8, 8), Both([ops.Identity(), ops.Identity()]))(X)
    assert seen and all(names == ["BasicLinear", "Bias", "Both"] for names in seen)
