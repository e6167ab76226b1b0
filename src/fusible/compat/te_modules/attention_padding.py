"""Padding masks: the lengths of sequences, and where padding lies among their tokens the order that brings it behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from fusible.compat.te_modules.attention_call import Lengths
from fusible.errors import ArgumentError, ShapeError, expected

__all__ = ["Mask", "Order", "of_padding"]

Mask: TypeAlias = Tensor | tuple[Tensor, Tensor]
"""NVIDIA's ``attention_mask``: one for both, or one for the queries and one for the keys."""


@dataclass(frozen=True, eq=False)
class Order:
    """Places of queries ``q`` and of keys ``kv``, int64 ``[b, s]``: those of each sequence's tokens, and then those of its padding; None where they
    lie so. Kernels take padding behind the tokens alone: what has it elsewhere is brought into this order before them, and the output back."""

    q: Tensor | None
    kv: Tensor | None

    def ordered(self, q: Tensor, k: Tensor, v: Tensor, format_: str) -> tuple[Tensor, Tensor, Tensor]:
        return _taken(q, self.q, format_), _taken(k, self.kv, format_), _taken(v, self.kv, format_)

    def ordered_bias(self, bias: Tensor) -> Tensor:
        """A bias ``[b or 1, h or 1, sq or 1, skv or 1]`` of the scores of what is in this order."""
        if self.q is not None and bias.shape[2] > 1:
            bias = torch.take_along_dim(bias, self.q[:, None, :, None], 2)
        if self.kv is not None and bias.shape[3] > 1:
            bias = torch.take_along_dim(bias, self.kv[:, None, None, :], 3)
        return bias

    def restored(self, o: Tensor, format_: str) -> Tensor:
        return _taken(o, None if self.q is None else self.q.argsort(dim=1), format_)


def _taken(x: Tensor, places: Tensor | None, format_: str) -> Tensor:
    if places is None:
        return x
    rows, sequence = (places.t(), 0) if format_ == "sbhd" else (places, 1)
    return torch.take_along_dim(x, rows[..., None, None], sequence)


def of_padding(attention_mask: Mask | None, known: Lengths, mask: str, batch: int, tokens: tuple[int, int]) -> tuple[Lengths, Order | None]:
    """The cumulative lengths of ``batch`` sequences of at most ``tokens`` queries and keys, and the order in which they lie so, None where they do:
    those that are ``known``, the others of a mask that is True for padding. Raises ``ArgumentError`` without a mask of bool, ``ShapeError`` for one
    of other sequences."""
    both = tuple(attention_mask) if isinstance(attention_mask, tuple | list) else (attention_mask, attention_mask)
    sides: list[tuple[Tensor, Tensor | None]] = []
    for cu, hidden, size, name in zip((known.q, known.kv), both, tokens, ("queries", "keys"), strict=True):
        if cu is not None:
            sides.append((cu, None))
        elif sides and hidden is both[0] and size == tokens[0] and known.q is None:
            sides.append(sides[0])
        else:
            rows = _rows(hidden, mask, batch, size, name)
            counts = rows.logical_not().sum(1).cumsum(0, dtype=torch.int32)
            sides.append((torch.cat([counts.new_zeros(1), counts]), _places(rows, mask)))
    (ends_q, places_q), (ends_kv, places_kv) = sides
    order = None if places_q is None and places_kv is None else Order(places_q, places_kv)
    return Lengths(ends_q, ends_kv, known.q_padded, known.kv_padded), order


def _rows(hidden: Tensor | None, mask: str, batch: int, tokens: int, name: str) -> Tensor:
    """A mask ``[b or 1, 1, 1, s]`` of queries or of keys, ``name``, as ``[b, s]``."""
    if not isinstance(hidden, Tensor) or hidden.dtype is not torch.bool:
        got = "none" if hidden is None else str(getattr(hidden, "dtype", type(hidden).__name__))
        do = "give one, True for padding, or cu_seqlens_q and cu_seqlens_kv"
        raise ArgumentError(expected("a bool attention_mask [b, 1, 1, s]", of=f"attention with {mask}", got=got, do=do))
    shape = list(hidden.shape)
    if len(shape) < 2 or shape[0] not in (1, batch) or shape[-1] != tokens or any(size != 1 for size in shape[1:-1]):
        what, do = f"[{batch}, 1, 1, {tokens}] for the {name}", "give a mask of these sequences"
        raise ShapeError(expected(what, of=f"attention_mask of attention with {mask}", got=shape, do=do))
    return hidden.reshape(shape[0], tokens).expand(batch, tokens)


def _places(hidden: Tensor, mask: str) -> Tensor | None:
    """Of ``Order``. The host looks at a mask that lies there. To ask a GPU would make all wait for it: that one refuses by itself, once it gets
    there, what has padding before tokens."""
    behind = (hidden[:, 1:] | ~hidden[:, :-1]).all()
    if hidden.is_cpu:
        return None if behind else hidden.to(torch.uint8).argsort(dim=1, stable=True)
    if hidden.is_cuda:
        do = "pad on the right, or pass qkv_format='thd'"
        torch._assert_async(behind, expected("padding behind the tokens", of=f"attention with {mask} on a GPU", got="some before them", do=do))  # pyright: ignore[reportPrivateImportUsage]
    return None
