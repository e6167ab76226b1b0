"""``Executor`` and ``Program``: the protocol of executors, and the type of the programs that they run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol, runtime_checkable

import torch

__all__ = ["Describing", "Executor", "Program"]

Program = Callable[[list[Any]], tuple[list[Any], Any]]
"""A pass as a function of a list of framework tensors, which it may empty: the resulting tensors, and what is known of them without running it."""


class Executor(Protocol):
    """Runs programs. ``whole``: wants each pass as one program, not cut into segments. ``in_place``: runs a program on the very tensors that it is
    given, so that what the program uses up is written to."""

    name: str
    whole: bool
    in_place: bool

    def __call__(self, key: Hashable, program: Program, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """The program's results on ``inputs``, a list that is used up. Two programs of one ``key`` are the same function on inputs of the same shapes
        and dtypes."""
        ...


@runtime_checkable
class Describing(Protocol):
    """An executor that tells of its programs."""

    def describe(self) -> list[str]:
        """Lines for ``explain``."""
        ...
