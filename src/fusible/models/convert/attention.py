"""Attention: queries, keys and values as one product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from fusible.models.convert.joining import pack
from fusible.models.convert.linear import joined_ops
from fusible.models.convert.pipelines import ConvertedModule
from fusible.models.convert.scaled_products import register
from fusible.models.convert.siblings import Siblings
from fusible.models.convert.swapping import Swap
from fusible.quantized import Recipe

__all__ = ["ConvertedAttention", "attention_swap", "find_projections"]

_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
)


class ConvertedAttention(ConvertedModule):
    """A module whose forward is that of its former class, and whose queries, keys and values are one product where they are of one input."""

    kept = (*ConvertedModule.kept, "forward")
    _members: tuple[str, ...]

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of its projections for x, side by side."""
        return self._run(x)

    def local_ops(self) -> tuple[Any, ...]:
        return ()  # the parameters are those of modules inside

    def join(self) -> None:
        """Let the projections compute together, from now on."""
        members = tuple(self._modules[name] for name in self._members)
        if all(isinstance(member, ConvertedModule) for member in members) and pack([member._parameters["weight"] for member in members]):  # type: ignore[union-attr]  # pyright: ignore
            group = Siblings(self, members)  # type: ignore[arg-type]  # pyright: ignore
            for place, member in enumerate(members):
                vars(member).update(_group=group, _place=place)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.join()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.join()
        if hasattr(vars(self).get("config"), "_attn_implementation"):
            register()  # a process that has unpickled the model knows nothing of it


def find_projections(module: nn.Module) -> tuple[str, ...]:
    """The names of the linear layers in a module that make its queries, keys and values; none where they cannot be one product."""
    for names in _NAMES:
        found = [module._modules.get(name) for name in names]
        if all(isinstance(layer, nn.Linear) for layer in found):
            weights = [layer._parameters["weight"] for layer in found]  # type: ignore[union-attr]  # pyright: ignore
            alike = {(weight.dtype, weight.device, weight.shape[1]) for weight in weights}  # type: ignore[union-attr]  # pyright: ignore
            return names if len(alike) == 1 else ()
    return ()


def attention_swap(module: nn.Module, names: tuple[str, ...], recipe: Recipe | None) -> Swap:
    """The swap of a module whose projections are those of these names."""
    layers = [module._modules[name] for name in names]
    attributes = ConvertedAttention.attributes(module, joined_ops(layers), recipe)
    return Swap(module, ConvertedAttention, {**attributes, "_members": names})
