"""``KVCache``: what a model has seen of several sequences, so that each further token is computed alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch

from fusible import nvte
from fusible.compute_pipeline import Plan
from fusible.errors import ArgumentError, CheckpointError, DTypeError, ShapeError, expected
from fusible.nvte import DType, Tensor
from fusible.ops.protocols import CachedKeys
from fusible.tex.calls.constructors import check_constructor

__all__ = ["KVCache", "check_cache"]


class KVCache:
    """Keys and values of ``sequences`` sequences of at most ``capacity`` tokens each, for one model.

    ``model(x, seq_lens, cache=cache)`` computes ``seq_lens[i]`` further tokens of sequence i (0 will do), which attend to all before them;
    ``cache.advance(seq_lens)`` then counts them in. Until then nothing has happened: a call that failed, or whose tokens were rejected, is repeated
    or replaced by another. A model without ``torch.no_grad()`` refuses a cache.

    Without ``page_size`` a sequence has its whole capacity from the start, in one piece. With it, memory is given out in pages of that many tokens,
    of which there are ``pages`` (default: enough for all sequences at once) in all. Sequences that begin alike may ``share`` pages.
    """

    def __init__(
        self,
        sequences: int,
        capacity: int,
        *,
        page_size: int | None = None,
        pages: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        sizes = {"sequences": sequences, "capacity": capacity, "page_size": page_size, "pages": pages}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ArgumentError(expected("at least 1", of=f"{name} of a KVCache", got=value, do="give a positive number"))
        self.page_size = page_size or capacity
        self.pages_per_sequence = -(-capacity // self.page_size)
        self.capacity = capacity
        self.dtype = dtype
        self.device = torch.empty(0, device="cpu" if device is None else device).device  # "cuda" is one of several
        self._lengths = [0] * sequences
        self._free = list(range(pages if pages is not None else sequences * self.pages_per_sequence))[::-1]
        self._pages = len(self._free)
        self._pages_of: list[list[int]] = [[] for _ in range(sequences)]
        self._further: dict[int, int] = {}  # of a page that several sequences hold, how many do beside the first
        self._layers: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def lengths(self) -> tuple[int, ...]:
        """The tokens counted in, of each sequence."""
        return tuple(self._lengths)

    @property
    def nbytes(self) -> int:
        """The memory of all layers that have been used so far."""
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in layer)

    def advance(self, seq_lens: Sequence[int] | torch.Tensor) -> None:
        """Count in the tokens of the last call. Raises ``ArgumentError`` for more than that call had room for."""
        new = self._checked(seq_lens)
        for length, count, pages in zip(self._lengths, new, self._pages_of, strict=True):
            if length + count > len(pages) * self.page_size:
                got = f"{count}, which no call computed"
                raise ArgumentError(expected("the seq_lens of the last call", of="advance", got=got, do="call the model first"))
        self._lengths = [length + count for length, count in zip(self._lengths, new, strict=True)]

    def truncate(self, index: int, length: int = 0) -> None:
        """Forget what sequence ``index`` has beyond ``length`` tokens, and give back the pages."""
        if not 0 <= length <= self._lengths[index]:
            raise ArgumentError(expected(f"at most the {self._lengths[index]} tokens of it", of="truncate", got=length, do="give a smaller length"))
        kept = -(-length // self.page_size)
        lengths, pages_of, free, further = list(self._lengths), [list(pages) for pages in self._pages_of], list(self._free), dict(self._further)
        lengths[index] = length
        for page in pages_of[index][kept:][::-1]:
            _let_go(page, free, further)
        del pages_of[index][kept:]
        if length % self.page_size and further.get(pages_of[index][-1]):
            pages_of[index][-1] = self._copied(pages_of[index][-1], free, further)
        # At once: an interrupt finds all of it or nothing.
        vars(self).update(_lengths=lengths, _pages_of=pages_of, _free=free, _further=further)

    def share(self, index: int, source: int, length: int) -> int:
        """Let the empty sequence ``index`` begin with the first ``length`` tokens of ``source``, as far as they fill pages: how many these are.

        Nothing is copied: each of the two writes behind its own tokens alone. A sequence that is truncated within such a page gets a copy of it.
        """
        if self._lengths[index] or not 0 <= length <= self._lengths[source]:
            got = f"{length} tokens for one of {self._lengths[index]}"
            wanted = f"at most the {self._lengths[source]} tokens of sequence {source} for an empty one"
            raise ArgumentError(expected(wanted, of="share", got=got, do="truncate the sequence first"))
        self.truncate(index)  # what a call that failed has set aside
        pages = self._pages_of[source][: length // self.page_size]
        lengths, pages_of, further = list(self._lengths), list(self._pages_of), dict(self._further)
        lengths[index], pages_of[index] = len(pages) * self.page_size, list(pages)
        further.update({page: further.get(page, 0) + 1 for page in pages})
        vars(self).update(_lengths=lengths, _pages_of=pages_of, _further=further)
        return lengths[index]

    def shares(self, index: int, position: int) -> bool:
        """Whether another sequence too holds the page of the token at ``position`` of sequence ``index``."""
        return self._pages_of[index][position // self.page_size] in self._further

    def free_pages(self, without: Iterable[int] = ()) -> int:
        """How many pages no sequence holds, but those ``without`` which it is asked."""
        gone = frozenset(without)
        pages_of = [pages for index, pages in enumerate(self._pages_of) if index not in gone]
        return self._pages - (len(set().union(*pages_of)) if self._further else sum(map(len, pages_of)))

    def _copied(self, page: int, free: list[int], further: dict[int, int]) -> int:
        """A page of one's own in the place of one that others hold too."""
        if not free:
            do = "truncate another sequence, or to a multiple of the page size"
            raise ArgumentError(expected("a free page", of="truncate within a page that is shared", got="none", do=do))
        _let_go(page, free, further)
        own = free.pop()
        with torch.inference_mode():
            for tensor in (tensor for layer in self._layers.values() for tensor in layer):
                tensor[own].copy_(tensor[page])
        return own

    def layers(self, owner: Hashable, plan: Plan, seq_lens: Sequence[int] | torch.Tensor) -> dict[int, nvte.KVCache]:
        """The caches of a plan's ops, by position, for a call with ``seq_lens`` further tokens. Memory for these is set aside.

        Raises ``DTypeError``, ``ShapeError`` or ``ArgumentError`` where the tokens do not fit, or where others than ``owner`` computed those that are
        counted in, and sets nothing aside then.
        """
        for kept in plan.caches.values():
            if kept.type is not None and nvte.te_to_torch_dtype(nvte.element(kept.type)) is not self.dtype:
                dtype, do = str(self.dtype).removeprefix("torch."), "cast x, or make a KVCache of the type that attention computes in"
                raise DTypeError(expected(f"{dtype}, as the KVCache is", of="x of a call with a cache", got=str(nvte.element(kept.type)), do=do))
        if any(self._lengths) and any((owner, position) not in self._layers for position in plan.caches):
            got, do = "another, a copy, or one that was rebuilt", "go on with that model as it was, or begin with a cache of its own"
            raise ArgumentError(expected("the model that filled it", of="a KVCache with tokens", got=got, do=do))
        checked = self._checked(seq_lens)
        self._reserve(checked)
        new = torch.tensor(checked, dtype=torch.int32, device="cpu")
        starts = torch.tensor(self._lengths, dtype=torch.int32, device="cpu")
        cu_lengths = torch.cat([torch.zeros(1, dtype=torch.int32, device="cpu"), (starts + new).cumsum(0, dtype=torch.int32)])
        page_table = torch.tensor([pages + [0] * (self.pages_per_sequence - len(pages)) for pages in self._pages_of], dtype=torch.int32, device="cpu")
        shared = [Tensor(t.to(self.device), DType.Int32) for t in (page_table, starts, cu_lengths)]
        return {position: nvte.KVCache(*self._layer((owner, position), kept), *shared) for position, kept in plan.caches.items()}

    def replace(self, owner: Hashable, positions: Iterable[int], tensors: Sequence[torch.Tensor]) -> None:
        """Take what a pass of ``owner`` has made of the layers at ``positions``, k and v of each in turn, where it wrote to none of them."""
        pairs = zip(positions, zip(tensors[::2], tensors[1::2], strict=True), strict=True)
        self._layers.update({(owner, position): pair for position, pair in pairs})

    def _layer(self, key: Hashable, kept: CachedKeys) -> list[Tensor]:
        layer = self._layers.get(key)
        if layer is None:
            widths = kept.width, kept.width if kept.value_width is None else kept.value_width
            shapes = [(self._pages, self.page_size, kept.groups, width) for width in widths]
            layer = self._layers[key] = tuple(torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes)  # pyright: ignore
        return [nvte.make_nvte_tensor(tensor) for tensor in layer]

    def _checked(self, seq_lens: Sequence[int] | torch.Tensor) -> list[int]:
        new = seq_lens.tolist() if isinstance(seq_lens, torch.Tensor) else list(seq_lens)
        if len(new) != len(self._lengths) or any(count < 0 for count in new):
            got = f"{len(new)} numbers" if len(new) != len(self._lengths) else min(new)
            wanted = f"{len(self._lengths)} numbers of at least 0, one per sequence"
            raise ShapeError(expected(wanted, of="seq_lens of a call with a cache", got=got, do="give 0 for a sequence that rests"))
        return new

    def _reserve(self, new: Sequence[int]) -> None:
        ends = [length + count for length, count in zip(self._lengths, new, strict=True)]
        if max(ends) > self.capacity:
            got = f"{max(ends)} of sequence {ends.index(max(ends))}"
            raise ArgumentError(expected(f"at most {self.capacity} tokens", of="a KVCache", got=got, do="make one of a larger capacity"))
        missing = [max(0, -(-end // self.page_size) - len(pages)) for end, pages in zip(ends, self._pages_of, strict=True)]
        if sum(missing) > len(self._free):
            wanted, got = f"{sum(missing)} free pages of {self.page_size} tokens", f"{len(self._free)} of {self._pages}"
            raise ArgumentError(expected(wanted, of="a KVCache", got=got, do="truncate a sequence that has ended, or make one with more pages"))
        if any(missing):
            free, pages_of = list(self._free), [list(pages) for pages in self._pages_of]
            for pages, count in zip(pages_of, missing, strict=True):
                pages += [free.pop() for _ in range(count)]
            vars(self).update(_pages_of=pages_of, _free=free)

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        """A cache of the same model, whose tokens go another way from here."""
        other = memo[id(self)] = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._lengths, other._free = list(self._lengths), list(self._free)
        other._pages_of = [list(pages) for pages in self._pages_of]
        other._further = dict(self._further)
        other._layers = {key: tuple(tensor.clone() for tensor in pair) for key, pair in self._layers.items()}  # pyright: ignore
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        got, do = "an attempt to pickle it", "compute its tokens again where they are wanted"
        raise CheckpointError(expected("copies by copy.deepcopy alone", of="a KVCache", got=got, do=do))

    def __repr__(self) -> str:
        return f"KVCache({len(self._lengths)} sequences, capacity={self.capacity}, page_size={self.page_size}, lengths={list(self._lengths)})"


check_constructor(KVCache)


def _let_go(page: int, free: list[int], further: dict[int, int]) -> None:
    """One sequence less holds ``page``; the last one frees it."""
    left = further.pop(page, 0)
    if left > 1:
        further[page] = left - 1
    elif not left:
        free.append(page)


def check_cache(cache: Any) -> None:
    """Raise ``DTypeError`` for what is no cache."""
    if not isinstance(cache, KVCache):
        raise DTypeError(expected("a KVCache", of="cache", got=type(cache).__qualname__, do="make one for the sequences"))
