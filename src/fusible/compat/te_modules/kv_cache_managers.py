"""Managers of the keys and values that generation keeps: one row for each sequence of a batch, or pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from fusible import tex
from fusible.compat.te_modules.attention_call import FORMATS
from fusible.compat.te_modules.base import device_of
from fusible.errors import ArgumentError, expected

__all__ = ["KVCacheManager", "NonPagedKVCacheManager", "PagedKVCacheManager"]

Lengths = OrderedDict[Hashable, int]
"""By a sequence's id, in the order of the batch: a number of tokens."""


class KVCacheManager:
    """Base of the managers: ``sequences``, the tokens of each by its id, and ``cache``, the keys and values by layer.

    A manager of one's own (``custom_cache_manager`` of ``InferenceParams``) overrides ``allocate_memory``, ``pre_step`` and ``step``.
    """

    def __init__(self) -> None:
        self.cache: dict[int, tuple[Any, Any]] = {}
        self.sequences: Lengths = OrderedDict()

    def reset(self) -> None:
        """Forget all sequences."""
        self.sequences = OrderedDict()

    def allocate_memory(self, layer_number: int) -> None:
        """Make a layer's keys and values."""
        self.cache[layer_number] = (None, None)

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> Lengths:
        """Add the tokens of the next pass to the lengths of the sequences; returns ``sequences``."""
        return self.sequences

    def step(
        self,
        layer_number: int,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        cu_new_seqlens: torch.Tensor,
        cu_cached_seqlens: torch.Tensor,
        qkv_format: str,
    ) -> tuple[Any, Any]:
        """Write a layer's new tokens; gives its keys and values."""
        return self.cache[layer_number]


class _OfTensors(KVCacheManager):
    """Base of both managers: each layer has a tensor of keys and one of values, with ``entries`` rows or pages of ``size`` tokens each."""

    def __init__(
        self,
        entries: int,
        size: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        max_batch_size: int,
        max_seqlen: int,
        head_dim_v: int | None,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim_k, self.dtype = num_heads, head_dim_k, dtype
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.max_batch_size, self.max_seqlen = max_batch_size, max_seqlen
        self._entries, self._size = entries, size

    def allocate_memory(self, layer_number: int) -> None:
        """A layer's keys ``[entries, size, num_heads, head_dim_k]`` and values ``[entries, size, num_heads, head_dim_v]``, zero."""
        k, v = (torch.zeros(self._shape(width), dtype=self.dtype, device=device_of("cuda")) for width in (self.head_dim_k, self.head_dim_v))
        self.cache[layer_number] = (k, v)

    def _shape(self, width: int) -> tuple[int, ...]:
        return self._entries, self._size, self.num_heads, width

    def _after(self, step_dict: Mapping[Hashable, int]) -> Lengths:
        """The sequences' lengths once the tokens of ``step_dict`` are there. Raises ``ArgumentError`` where they do not fit."""
        lengths: Lengths = OrderedDict((name, self.sequences.get(name, 0) + count) for name, count in step_dict.items())
        if len(lengths) > self.max_batch_size:
            do = "make InferenceParams of a larger max_batch_size"
            raise ArgumentError(expected(f"at most {self.max_batch_size} sequences", of="step_dict of pre_step", got=len(lengths), do=do))
        for name, length in lengths.items():
            if step_dict[name] < 0 or length > self.max_seqlen:
                wanted, do = f"0 to {self.max_seqlen} tokens", "make InferenceParams of a larger max_sequence_length, or end the sequence"
                raise ArgumentError(expected(wanted, of=f"sequence {name!r} in step_dict of pre_step", got=length, do=do))
        return lengths

    def step(
        self,
        layer_number: int,
        new_k: torch.Tensor,
        new_v: torch.Tensor,
        cu_new_seqlens: torch.Tensor,
        cu_cached_seqlens: torch.Tensor,
        qkv_format: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new tokens at the ends of their sequences; gives its keys and values: of a cache in rows those of the batch, ``[b,
        max_seqlen, num_heads, width]``, of one in pages all of them."""
        table = self._table(layer_number)
        batch = {"bshd": new_k.shape[0], "sbhd": new_k.shape[1]}.get(qkv_format, self.max_batch_size)
        longest = {"bshd": new_k.shape[1], "sbhd": new_k.shape[0]}.get(qkv_format, self.max_seqlen)
        rows, ends = table.ndim == 1, (cu_new_seqlens, cu_cached_seqlens)
        pages = 1 if rows else table.shape[1]
        tex.copy_to_kv_cache(new_k, new_v, *self.cache[layer_number], table, *ends, FORMATS[qkv_format], batch, longest, self.max_seqlen, pages, rows)
        return self._written(layer_number, batch)

    def _table(self, layer: int) -> torch.Tensor:
        """Where the sequences of the batch are in a layer's memory, int32: of each the row that becomes its own, or its pages."""
        raise NotImplementedError

    def _written(self, layer: int, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Called once the new tokens of ``sequences`` are written, to note what a layer's memory holds; gives its keys and values."""
        return self.cache[layer]


class NonPagedKVCacheManager(_OfTensors):
    """Keys and values ``[max_batch_size, max_seqlen, num_heads, width]``: the row of a sequence is its place in the batch. When sequences end, the
    rows of the others move up at the next ``step`` of each layer."""

    def __init__(
        self, max_batch_size: int, max_seqlen: int, num_heads: int, head_dim_k: int, dtype: torch.dtype, head_dim_v: int | None = None
    ) -> None:
        super().__init__(max_batch_size, max_seqlen, num_heads, head_dim_k, dtype, max_batch_size, max_seqlen, head_dim_v)
        self._rows: dict[int, tuple[Hashable, ...]] = {}

    def reset(self) -> None:
        """Forget all sequences."""
        super().reset()
        self._rows = {}

    def allocate_memory(self, layer_number: int) -> None:
        super().allocate_memory(layer_number)
        self._rows.pop(layer_number, None)

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> Lengths:
        """Add the tokens of the next pass, and forget the sequences that ``step_dict`` lacks."""
        self.sequences = self._after(step_dict)
        return self.sequences

    def _table(self, layer: int) -> torch.Tensor:
        # By what this layer's rows hold, not by the last batch: a pass that failed half-way is repeated, and must not move rows twice.
        former = self._rows.get(layer, ())
        kept = [former.index(name) if name in former else -1 for name in self.sequences]
        free = [row for row in range(self.max_batch_size) if row not in kept]
        order = [free.pop(0) if row < 0 else row for row in kept] + free
        return torch.tensor(order, dtype=torch.int32, device=self.cache[layer][0].device)

    def _written(self, layer: int, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._rows[layer] = tuple(self.sequences)
        k, v = self.cache[layer]
        return k[:sequences], v[:sequences]


class PagedKVCacheManager(_OfTensors):
    """Keys and values ``[total_num_pages, page_size, num_heads, width]``: position p of the sequence at place i of the batch is in page
    ``page_table[i, p // page_size]`` (int32 ``[max_batch_size, max_seqlen // page_size]``; 0 where a sequence has no page)."""

    def __init__(
        self,
        total_num_pages: int,
        page_size: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        max_batch_size: int,
        max_seqlen: int,
        head_dim_v: int | None = None,
    ) -> None:
        super().__init__(total_num_pages, page_size, num_heads, head_dim_k, dtype, max_batch_size, max_seqlen, head_dim_v)
        self.total_num_pages, self.page_size, self.max_pages_per_seq = total_num_pages, page_size, max_seqlen // page_size
        shape = (max_batch_size, self.max_pages_per_seq)
        self.page_table = torch.zeros(shape, dtype=torch.int32, device=device_of("cuda"))
        self.reset()

    def reset(self) -> None:
        """Forget all sequences, and give their pages back."""
        super().reset()
        self._free = list(range(self.total_num_pages))
        self._pages: dict[Hashable, list[int]] = {}
        self.page_table.zero_()

    def has_free_page(self) -> bool:
        """Whether a page is left."""
        return bool(self._free)

    def get_sequence_count(self) -> int:
        """The number of sequences."""
        return len(self.sequences)

    def get_sequence_lengths(self) -> list[int]:
        """The tokens of each sequence, in the order of the batch."""
        return list(self.sequences.values())

    def get_page_list(self, seq: Hashable) -> list[int]:
        """The pages of a sequence."""
        return list(self._pages.get(seq, ()))

    def get_page_count(self, seq: Hashable) -> int:
        """The number of pages of a sequence."""
        return len(self._pages.get(seq, ()))

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> Lengths:
        """Add the tokens of the next pass, and give back the pages of the sequences that ``step_dict`` lacks. Raises ``ArgumentError`` where no page
        is left, and changes nothing then."""
        lengths = self._after(step_dict)
        free = self._free + [page for name, pages in self._pages.items() if name not in lengths for page in pages]
        pages_of = {name: self.get_page_list(name) for name in lengths}
        missing = {name: -(-length // self.page_size) - len(pages_of[name]) for name, length in lengths.items()}
        if sum(missing.values()) > len(free):
            do = "end a sequence, or make InferenceParams with more pages"
            raise ArgumentError(expected(f"{sum(missing.values())} free pages", of="a paged cache", got=len(free), do=do))
        for name, pages in pages_of.items():
            pages += [free.pop(0) for _ in range(missing[name])]
        self.sequences, self._pages, self._free = lengths, pages_of, free
        rows = [pages + [0] * (self.max_pages_per_seq - len(pages)) for pages in pages_of.values()]
        if rows:
            self.page_table[: len(rows)] = torch.tensor(rows, dtype=torch.int32, device="cpu")
        return self.sequences

    def _table(self, layer: int) -> torch.Tensor:
        return self.page_table
