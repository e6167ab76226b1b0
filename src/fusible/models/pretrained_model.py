"""``PretrainedModel``: what the models of all families are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from fusible.pytorch import Recipe, autocast
from fusible.pytorch.engine.executors import make_executor
from fusible.pytorch.modules.base import BaseModule

__all__ = ["Example", "PretrainedModel"]


@dataclass(frozen=True)
class Example:
    """An input such as a model takes; by the number of each dimension that is open its name and the most that it may be, None for any."""

    value: torch.Tensor
    dimensions: Mapping[int, tuple[str, int | None]]


class PretrainedModel(nn.Module):
    """A model of a family. ``config``: what ``config.json`` says of it; ``blueprint``: what its family makes of that; ``recipe``: under which it
    computes, or None."""

    def __init__(self, config: Mapping[str, Any], blueprint: Any, recipe: Recipe | None) -> None:
        super().__init__()
        self.config, self.blueprint, self.recipe = dict(config), blueprint, recipe

    @property
    def dtype(self) -> torch.dtype:
        """That of activations."""
        return self._first_parameter.dtype

    @property
    def device(self) -> torch.device:
        """Where its parameters are."""
        return self._first_parameter.device

    def compile(self, executor: str = "xla") -> Self:  # type: ignore[override] # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the passes of its modules by ``executor`` from now on, as ``Sequential.compile``; a call of the model goes through one program for all
        of its blocks. Returns the model. Raises ``ArgumentError`` for an unknown executor."""
        make_executor(executor)
        for module in self.modules():
            if isinstance(module, BaseModule):
                module.compile(executor)
        return self

    def stored_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters by the names and in the shapes that the family's checkpoints have, each once: where a head's weight is an embedding's, as
        that alone."""
        raise NotImplementedError

    def examples(self) -> tuple[Example, ...]:
        """What a call takes, small."""
        raise NotImplementedError

    @property
    def _first_parameter(self) -> torch.Tensor:
        """What a model makes rows of first, which no recipe quantizes."""
        return next(self.parameters())

    def _computing(self) -> Any:
        return autocast(recipe=self.recipe) if self.recipe is not None else contextlib.nullcontext()
