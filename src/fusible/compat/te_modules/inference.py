"""``InferenceParams``: keys and values that generation keeps, so that each further token is computed alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from fusible.compat.te_modules.attention_call import FORMATS, Lengths
from fusible.compat.te_modules.base import device_of
from fusible.compat.te_modules.kv_cache_managers import KVCacheManager, NonPagedKVCacheManager, PagedKVCacheManager
from fusible.errors import ArgumentError, check_number, expected
from fusible.tex.calls.constructors import check_constructor

__all__ = ["InferenceParams", "KVCacheManager", "NonPagedKVCacheManager", "PagedKVCacheManager", "stepped"]


class InferenceParams:
    """The keys and values of at most ``max_batch_size`` sequences of at most ``max_sequence_length`` tokens, for all layers of a model.

    Before each pass ``pre_step`` is told, by id and in the order of the batch, how many tokens each sequence gets: its prompt's at first, then one;
    a sequence that is not named has ended. Then the model is called with ``inference_params`` and a padding mask, on the new tokens alone: rows of
    ``qkv_format``, of which a sequence may have fewer than there are rows (``"bshd"``, ``"sbhd"``). They attend to what came before, themselves
    included; nothing of it is differentiated. Each layer is known by its ``layer_number``.

    ``num_heads_kv``, ``head_dim_k``, ``head_dim_v`` (default: ``head_dim_k``), ``dtype``: of the cached keys and values. ``is_paged``: memory is
    given out in pages of ``page_size`` tokens, ``total_num_pages`` in all, which is ``max_batch_size * max_sequence_length / page_size``.
    ``max_ctx_len``, the most tokens of a pass, is wanted for ``"thd"``, and not looked at. ``custom_cache_manager``: a class to keep keys and values
    by, in place of ``NonPagedKVCacheManager`` or ``PagedKVCacheManager`` and made with its arguments.

    A sequence that goes on may get any number of tokens, where NVIDIA's class counts one. For another cache, of Fusible's own modules, see
    ``fusible.pytorch.KVCache``.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: Callable[..., KVCacheManager] | None = None,
    ) -> None:
        for name, value in {"num_heads_kv": num_heads_kv, "head_dim_k": head_dim_k, "dtype": dtype}.items():
            if value is None:
                raise ArgumentError(expected(f"{name}", of="InferenceParams", got="none", do="say what is cached"))
        for name, count in {"max_batch_size": max_batch_size, "max_sequence_length": max_sequence_length}.items():
            check_number(count, f"{name} of InferenceParams", least=1)
        _check_format(qkv_format)
        if qkv_format == "thd" and max_ctx_len is None:
            raise ArgumentError(expected("max_ctx_len", of="InferenceParams with qkv_format='thd'", got="none", do="give the most tokens of a pass"))
        self.max_batch_size, self.max_sequence_length, self.max_ctx_len = max_batch_size, max_sequence_length, max_ctx_len
        self.num_heads_kv, self.head_dim_k, self.dtype, self.is_paged = num_heads_kv, head_dim_k, dtype, is_paged
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        options: dict[str, Any] = {"num_heads": num_heads_kv, "head_dim_k": head_dim_k, "dtype": dtype, "head_dim_v": self.head_dim_v}
        options.update(max_batch_size=max_batch_size, max_seqlen=max_sequence_length)
        default: Callable[..., KVCacheManager] = NonPagedKVCacheManager
        if is_paged:
            default = PagedKVCacheManager
            self.page_size, self.total_num_pages = _pages(max_batch_size, max_sequence_length, page_size, total_num_pages)
            options.update(page_size=self.page_size, total_num_pages=self.total_num_pages)
        self.cache_manager: Any = (custom_cache_manager or default)(**options)
        self.cache_qkv_format = "bshd"
        self._take_format(qkv_format)
        self.sequences: OrderedDict[Hashable, int] = OrderedDict()
        self.sequences_pre_step: OrderedDict[Hashable, int] = OrderedDict()
        self.batch_size = 0
        zeros = {"dtype": torch.int32, "device": device_of("cuda")}
        self.cu_seqlens_q, self.cu_seqlens_kv = (torch.zeros(max_batch_size + 1, **zeros) for _ in range(2))  # type: ignore[call-overload]
        self.pre_step_seqlens = torch.zeros(max_batch_size, **zeros)  # type: ignore[call-overload]

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        self.sequences = OrderedDict()
        self.cache_manager.reset()

    def allocate_memory(self, layer_number: int) -> None:
        """Make a layer's keys and values: ``[max_batch_size, max_sequence_length, heads, width]``, or
        ``[total_num_pages, page_size, heads, width]``. A layer that has none does so when it is called first."""
        self.cache_manager.allocate_memory(layer_number)

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> None:
        """Begin a pass: ``step_dict`` has the number of new tokens of each sequence. Raises ``ArgumentError`` where there is no room for them, and
        changes nothing then."""
        self.sequences = self.cache_manager.pre_step(step_dict)
        self.batch_size = len(step_dict)
        self.sequences_pre_step = OrderedDict((name, length - step_dict[name]) for name, length in self.sequences.items())
        rest = [0] * (self.max_batch_size - self.batch_size)
        self.pre_step_seqlens.copy_(torch.tensor([*self.sequences_pre_step.values(), *rest], dtype=torch.int32, device="cpu"))
        for ends, counts in ((self.cu_seqlens_q, step_dict), (self.cu_seqlens_kv, self.sequences)):
            ends[1:] = torch.tensor([*counts.values(), *rest], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)

    def get_seqlens_pre_step(self) -> torch.Tensor:
        """int32 ``[max_batch_size]``: the tokens of each sequence of the batch before this pass, which are the positions of its first new ones."""
        return self.pre_step_seqlens

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values from their pages: ``[b, max_sequence_length, heads, width]``."""
        table = self.cache_manager.page_table[: self.batch_size].long()
        k, v = (pages[table].flatten(1, 2) for pages in self.cache_manager.cache[layer_number])
        return k, v

    def step(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, str]:
        """Write a layer's new keys and values. ``(k, v, cu_seqlens_q, cu_seqlens_kv, max_sequence_length, format)``: all keys and values that the
        cache manager has of them, where the sequences of new and of all tokens end (int32 ``[max_batch_size + 1]``), and what ``qkv_format`` is to a
        cache: ``"bshd"``, ``"sbhd_2bshd"`` or ``"thd_2bshd"``."""
        _check_format(qkv_format)
        k, v = self.cache_manager.step(layer_number, new_k, new_v, self.cu_seqlens_q, self.cu_seqlens_kv, qkv_format)
        self._take_format(qkv_format)
        return k, v, self.cu_seqlens_q, self.cu_seqlens_kv, self.max_sequence_length, self.output_qkv_format

    def _take_format(self, qkv_format: str) -> None:
        own = self.cache_qkv_format
        self.input_qkv_format, self.output_qkv_format = qkv_format, own if qkv_format == own else f"{qkv_format}_2{own}"

    def __repr__(self) -> str:
        pages = f"{self.total_num_pages} pages of {self.page_size}" if self.is_paged else f"{self.max_batch_size} rows of {self.max_sequence_length}"
        return f"InferenceParams({pages} tokens, heads={self.num_heads_kv}, widths=({self.head_dim_k}, {self.head_dim_v}), dtype={self.dtype})"


check_constructor(InferenceParams)


def _check_format(qkv_format: str) -> None:
    if qkv_format not in FORMATS:
        do = "name one of these"
        raise ArgumentError(expected(f"one of {', '.join(FORMATS)}", of="qkv_format of InferenceParams", got=repr(qkv_format), do=do))


def _pages(sequences: int, capacity: int, page_size: int | None, pages: int | None) -> tuple[int, int]:
    """The tokens of a page, and the number of pages. Raises ``ArgumentError`` unless they make up the capacity."""
    if page_size is None or page_size < 1 or capacity % page_size != 0:
        of, do = "page_size of InferenceParams with is_paged", "give one"
        raise ArgumentError(expected(f"a divisor of the {capacity} tokens of a sequence", of=of, got=page_size, do=do))
    needed = sequences * capacity // page_size
    if pages != needed:
        of, do = "total_num_pages of InferenceParams with is_paged", "give max_batch_size * max_sequence_length / page_size"
        raise ArgumentError(expected(str(needed), of=of, got=pages, do=do))
    return page_size, needed


def stepped(
    params: InferenceParams, layer_number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, format_: str
) -> tuple[torch.Tensor, torch.Tensor, Lengths, tuple[int, int]]:
    """Write a layer's new keys and values, and return what its queries attend to: the keys and values of the cache, the cumulative lengths of the
    sequences, and the longest lengths of queries and of keys."""
    sequences = {"bshd": q.shape[0], "sbhd": q.shape[1]}.get(format_, params.max_batch_size)
    if not params.batch_size <= sequences <= params.max_batch_size:
        wanted, do = f"{params.batch_size} to {params.max_batch_size} sequences", "call pre_step with the lengths of this pass"
        raise ArgumentError(expected(wanted, of="query_layer with inference_params", got=sequences, do=do))
    with torch.no_grad():
        k, v, ends, all_ends, capacity, _ = params.step(layer_number, k.detach().contiguous(), v.detach().contiguous(), format_)
    pages = params.cache_manager.page_table[:sequences] if params.is_paged else None
    lengths = Lengths(ends[: sequences + 1], all_ends[: sequences + 1], pages=pages)
    rows = {"bshd": q.shape[1], "sbhd": q.shape[0]}.get(format_)
    return k, v, lengths, (int(ends.diff().max()) if rows is None else rows, capacity)
