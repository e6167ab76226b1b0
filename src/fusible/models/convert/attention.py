"""Attention: queries, keys and values as one product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from fusible.models.convert.as_found import AsFound
from fusible.models.convert.calls import call_of
from fusible.models.convert.joining import pack
from fusible.models.convert.linear import joined_ops
from fusible.models.convert.pipelines import ConvertedModule
from fusible.models.convert.projections import Projections
from fusible.models.convert.siblings import Siblings
from fusible.models.convert.swapping import Swap
from fusible.quantized import Recipe

__all__ = ["ConvertedAttention", "attention_swap"]


class ConvertedAttention(ConvertedModule):
    """A module whose forward is that of its former class, and whose queries, keys and values are one product where they are of one input."""

    _projections: Projections
    _siblings: Siblings | None
    """They, where their weights have been put together."""
    _as_found: AsFound

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        siblings = self._siblings
        if siblings is None or not self._projections.read_one_input(args, kwargs):
            return self.original.forward(self, *args, **kwargs)
        return call_of(siblings.call, self.original.forward, self, *args, **kwargs)

    def goes_with_members(self) -> bool:
        """Whether it may compute for its projections as they are."""
        return self._goes_with(self._as_found)

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of its projections for x, side by side."""
        return self._run(x)

    def local_ops(self) -> tuple[Any, ...]:
        return ()  # the parameters are those of modules inside

    def join(self) -> None:
        """Let the projections compute together, from now on."""
        members = tuple(self._modules[name] for name in self._projections.names)
        if all(isinstance(member, ConvertedModule) for member in members) and pack([member._parameters["weight"] for member in members]):  # type: ignore[union-attr]  # pyright: ignore
            group = Siblings(self, members)  # type: ignore[arg-type]  # pyright: ignore
            vars(self)["_siblings"] = group
            for place, member in enumerate(members):
                vars(member).update(_group=group, _place=place)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.join()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_siblings": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.join()


def attention_swap(module: nn.Module, found: Projections, recipe: Recipe | None) -> Swap:
    """The swap of a module whose projections were found."""
    layers: list[Any] = [module._modules[name] for name in found.names]
    attributes = ConvertedAttention.attributes(module, joined_ops(layers), recipe)
    return Swap(module, ConvertedAttention, {**attributes, "_projections": found, "_siblings": None, "_as_found": AsFound.of((), layers)})
