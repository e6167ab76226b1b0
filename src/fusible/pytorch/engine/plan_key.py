"""``PlanKey``: what a call looks its plan up by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fusible.compute_pipeline import PlanRequest
from fusible.nvte import Type, nvte_dtype
from fusible.quantized import Recipe

__all__ = ["PlanKey"]


class PlanKey(NamedTuple):
    """All of a call on which its plan depends, in the form in which the call has it: dtypes are torch's, for instance. A key that has no plan yet is
    turned into a ``PlanRequest``.

    It is a tuple, for one is made and hashed at every call: a dataclass would hash in Python. Who makes one at every call does so by
    ``tuple.__new__``, which costs 0.15 us where calling the class costs 0.35 (12 fields, Python 3.11).
    """

    recipe: Recipe | None
    """By value."""
    x_dtype: torch.dtype
    width: int
    """The columns of x."""
    x_device: torch.device
    x_grad: bool
    """Whether the gradient of x is wanted."""
    args: tuple[tuple[Any, bool], ...]
    """For each parameter its type as held (a torch dtype, or the ``stored_key`` of a quantized one), and whether its gradient is wanted."""
    args_device: torch.device | None
    """The device of the first parameter, if there is one."""
    training: tuple[bool, ...]
    """Per op, the mode of its module."""
    whole: bool
    """Whether the executor wants each pass as one program."""
    fusions: int
    """The epoch of the fusion registry."""
    sides_grad: tuple[bool, ...]
    """For each side value that the caller gives, whether its gradient is wanted."""
    fused: tuple[tuple[int, int, Any], ...]
    """As of ``PlanRequest``."""

    def request(self, args: tuple[tuple[tuple[Type, bool], ...], ...], sides: Sequence[str], outputs: tuple[str, ...]) -> PlanRequest:
        """The request for a plan of this key. ``args``: as of ``PlanRequest``; ``sides``, ``outputs``: the names of the caller's side values."""
        return PlanRequest(
            recipe=self.recipe,
            activation=nvte_dtype(self.x_dtype),
            width=self.width,
            x_grad=self.x_grad,
            args=args,
            training=self.training,
            whole=self.whole,
            fusions=self.fusions,
            sides=tuple(zip(sides, self.sides_grad, strict=True)),
            outputs=outputs,
            fused=self.fused,
        )
