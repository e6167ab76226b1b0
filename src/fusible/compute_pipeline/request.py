"""``PlanRequest``: everything on which a plan depends, as one hashable value."""

from __future__ import annotations

from typing import NamedTuple

from fusible.fusions import Fusion
from fusible.nvte import DType, Type
from fusible.quantized import Recipe

__all__ = ["PlanRequest"]


class PlanRequest(NamedTuple):
    """``recipe``: by value; None for no quantization. ``activation``: the dtype of x. ``width``: its columns. ``x_grad``: whether the gradient of x
    is wanted. ``args``: per op, for each of its parameters, (the type that it is held in, whether its gradient is wanted). ``training``: per op, the
    mode of its module. ``whole``: whether the passes must not be cut into segments. ``fusions``: the epoch of the fusion registry. ``sides``: the
    side values that the caller gives, by name, and whether their gradients are wanted. ``outputs``: the names of those that the caller gets.
    ``fused``: the stretches of ops that the caller has fused itself, ``(start, stop, fusion)``.
    """

    recipe: Recipe | None
    activation: DType
    width: int
    x_grad: bool
    args: tuple[tuple[tuple[Type, bool], ...], ...]
    training: tuple[bool, ...]
    whole: bool
    fusions: int
    sides: tuple[tuple[str, bool], ...] = ()
    outputs: tuple[str, ...] = ()
    fused: tuple[tuple[int, int, Fusion], ...] = ()
