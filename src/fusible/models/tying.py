"""Heads whose weight is the table of an embedding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fusible.models.parts import Part, Product, Weights, stored_in

__all__ = ["stored_head", "tied_product"]


def tied_product(product: Product, table: nn.Embedding, weights: Weights) -> nn.Module:
    """``product`` by the weight of ``table``: one parameter, for optimizers and for what counts bytes."""
    made = product.of(table.weight.detach(), product.biases(weights), weights)
    made.weight = table.weight
    return made


def stored_head(parts: Sequence[Part], modules: Sequence[Any], table: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint has of the head ``modules``, without a last weight that is ``table``."""
    last = parts[-1]
    shared = f"{last.names[0]}.weight" if isinstance(last, Product) and modules[-1].weight is table else None
    yield from ((name, tensor) for name, tensor in stored_in(parts, modules) if name != shared)
