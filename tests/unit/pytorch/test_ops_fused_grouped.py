"""The experts of a mixture as one operation: ``GroupedMLP_CuTeGEMMGLU`` and ``GroupedMLP_CuTeGEMMUnary``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusible
from fusible.errors import ArgumentError
from fusible.pytorch import ops
from fusible.pytorch.ops import fused
from fusible.pytorch.ops.fused.grouped_mlp import fuse_glu_ops, fuse_unary_activation_ops

GroupedLinear: Any = getattr(ops, "GroupedLinear", None)
needs_groups = pytest.mark.skipif(GroupedLinear is None, reason="there is no GroupedLinear to put together")

WIDTH = 64
SIZES = torch.tensor([32, 64, 0, 32])  # whole blocks of MXFP8
RECIPES = [None, fusible.DelayedScaling(), fusible.Float8CurrentScaling(), fusible.MXFP8BlockScaling()]
KINDS: list[tuple[Any, Any, Any, int]] = [
    (fused.GroupedMLP_CuTeGEMMGLU, ops.ScaledSwiGLU, fuse_glu_ops, 2),
    (fused.GroupedMLP_CuTeGEMMGLU, ops.ScaledClampedQGeGLU, fuse_glu_ops, 2),
    (fused.GroupedMLP_CuTeGEMMUnary, ops.ScaledSReLU, fuse_unary_activation_ops, 1),
]


def _basics(activation: Any, halves: int) -> list[Any]:
    torch.manual_seed(0)
    groups = len(SIZES)
    first, second = (GroupedLinear(groups, WIDTH, width, dtype=torch.bfloat16) for width in (halves * WIDTH, WIDTH))
    return [first, activation(), second]


def _put_together(cls: Any, basics: list[Any]) -> Any:
    return cls(fc1=basics[0], activation=basics[1], fc2=basics[2])


def _train(model: Any, recipe: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    rows = int(SIZES.sum())
    x, scales = torch.randn(rows, WIDTH, dtype=torch.bfloat16, requires_grad=True), torch.rand(rows, requires_grad=True)
    with fusible.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, SIZES, scales, SIZES)
    y.backward(torch.randn_like(y))
    return [y.detach(), x.grad, scales.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


@needs_groups
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize(("cls", "activation", "fuse", "halves"), KINDS, ids=lambda kind: getattr(kind, "__name__", ""))
def test_equals_the_three_operations_bit_for_bit(cls: Any, activation: Any, fuse: Any, halves: int, recipe: Any) -> None:
    class Own(cls):
        def fuser_forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().fuser_forward(*args, **kwargs)

        def fuser_backward(self, *args: Any, **kwargs: Any) -> Any:
            return super().fuser_backward(*args, **kwargs)

    wanted = _train(ops.Sequential(*_basics(activation, halves)), recipe)
    results = [_train(ops.Sequential(_put_together(each, _basics(activation, halves))), recipe) for each in (cls, Own)]
    with ops.register_forward_backward_fusion(fuse):
        results.append(_train(ops.Sequential(*_basics(activation, halves)), recipe))
    for got in results:
        for one, other in zip(got, wanted, strict=True):
            assert torch.equal(one, other)


@needs_groups
@pytest.mark.parametrize(("cls", "activation", "fuse", "halves"), KINDS, ids=lambda kind: getattr(kind, "__name__", ""))
def test_matching_puts_the_three_together(cls: Any, activation: Any, fuse: Any, halves: int) -> None:
    basics = _basics(activation, halves)
    assert [type(op) for op in fuse([ops.Identity(), *basics], recipe=None)] == [ops.Identity, cls]
    assert fuse(basics[:2], recipe=None) == basics[:2]


@needs_groups
def test_sizes_that_do_not_fit_are_refused() -> None:
    _first, activation, second = _basics(ops.ScaledSwiGLU, 2)
    wanted = r"^fc1 of GroupedMLP_CuTeGEMMGLU: expected 4 groups, out_features=128, got 4 groups, out_features=64; "
    with pytest.raises(ArgumentError, match=wanted):
        fused.GroupedMLP_CuTeGEMMGLU(fc1=second, activation=activation, fc2=second)


def test_other_operations_are_refused() -> None:
    linear: Any = ops.BasicLinear(WIDTH, WIDTH)
    with pytest.raises(ArgumentError, match="^fc1 of GroupedMLP_CuTeGEMMUnary: expected GroupedLinear, got BasicLinear; "):
        fused.GroupedMLP_CuTeGEMMUnary(fc1=linear, activation=ops.ScaledSReLU(), fc2=linear)
    chain = [linear, ops.ScaledSReLU(), linear]
    assert fuse_unary_activation_ops(chain) == chain
