"""How parameters begin: what a module was told when it was made, kept to draw them anew."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from fusible.errors import ArgumentError, expected

__all__ = ["Init", "ones", "zeros"]


class Init:
    """A function that fills a new tensor and returns it. A copy of a module has it too; one that was pickled, where the function can be."""

    def __init__(self, method: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        self._method = method

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._method is None:
            of, do = "a module whose parameters are drawn anew", "make the module anew, or load its parameters"
            raise ArgumentError(expected("one that was made here", of=of, got="one that was unpickled without its function", do=do))
        return self._method(x)

    def of_each(self, x: torch.Tensor) -> torch.Tensor:
        """Fill each of the matrices ``x [count, rows, columns]``."""
        for matrix in x:
            matrix.copy_(self(torch.empty_like(matrix)))
        return x

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickle.dumps(self._method)
        except (pickle.PicklingError, AttributeError, TypeError):
            return Init, (None,)
        return Init, (self._method,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Init:
        return self


ones = Init(torch.nn.init.ones_)
zeros = Init(torch.nn.init.zeros_)
