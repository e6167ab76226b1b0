"""A cache of keys and values on lazy tensors: what is written to it, and what attention reads of it.

Where things go is a tensor's business here, page tables and lengths alike: one program serves every step of as many new tokens. Lazy tensors are
gathered from, never scattered to, so each place of the cache looks up whether a new token comes to it. Within ``in_place`` the compiled kernels write
to the cache as it is, which costs as much as the new tokens do.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fusible import cpp_extensions, lazy
from fusible.lazy import Tensor
from fusible.lazy.trace import TraceTensor
from fusible.tex.backends.xla import native
from fusible.tex.backends.xla.heads_first import from_heads_first, heads_first
from fusible.tex.backends.xla.segments import lengths
from fusible.tex.backends.xla.token_layouts import in_rows, in_sequence
from fusible.tex.calls.attention import bounds, check_counts
from fusible.tex.calls.attention_layout import QKVLayout
from fusible.tex.interface.declare import CallArguments

__all__ = ["Memory", "UnpackedRows", "gathered", "in_place", "memory_of", "put"]


class Memory:
    """The inputs of a program to whose memory it may write, as eager execution does: caches that ``copy_to_kv_cache`` adds to.

    ``done``: of each call that writes, a result that is there when it has written.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        # Objects of their own, since those that are given may be assigned to.
        self._inputs = {x.trace_tensor: (Tensor.from_trace_tensor(x.trace_tensor), None) for x in inputs}
        self._written: dict[TraceTensor, tuple[Tensor, Tensor]] = {}
        self.done: list[Tensor] = []

    def found(self, cache: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """The input in whose memory ``cache`` lies, and the result that its readers wait for; None of what is computed."""
        return self._written.get(cache.trace_tensor) or self._inputs.get(cache.trace_tensor)

    @property
    def written(self) -> list[Tensor]:
        """The inputs that are written to."""
        return [memory for memory, _ in self._written.values()]

    def write(self, cache: Tensor, memory: Tensor, done: Tensor) -> None:
        """Let ``cache`` stand for what lies in ``memory`` when ``done`` is there; for readers that do not know of this, a copy that is made then."""
        copy = {"src": memory, "after": done, "dst": native.Result(memory.shape, memory.dtype)}
        cache.assign_(native.call("copy", copy)["dst"])
        self._written[cache.trace_tensor] = memory, done


class _Local(threading.local):
    memory: Memory | None = None


_local = _Local()


@contextmanager
def in_place(inputs: Sequence[Tensor]) -> Iterator[Memory]:
    """Let what this thread records write to the memory of a program's ``inputs``."""
    former, _local.memory = _local.memory, Memory(inputs)
    try:
        yield _local.memory
    finally:
        _local.memory = former


def memory_of(cache: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """``Memory.found`` of what is being recorded."""
    return None if _local.memory is None else _local.memory.found(cache)


@dataclass(frozen=True)
class UnpackedRows:
    """The sequences of a THD batch, each in a row of its own of ``longest`` tokens: what lies past their ``sizes`` (int32 ``[b]``) is no matter."""

    cu: Tensor
    starts: Tensor | None
    sizes: Tensor
    tokens: int
    longest: int

    @classmethod
    def of(cls, lay: QKVLayout, call: CallArguments) -> UnpackedRows | None:
        """The queries of a call, or None where they are rows already."""
        if lay.q != "THD":
            return None
        cu = lazy.cast(bounds(call.cu_seqlens_q, "q"), lazy.int32)
        check_counts(cu.size - 1, bounds(call.cu_seqlens_kv, "kv").size - 1)
        padded = call.cu_seqlens_q_padded
        starts = None if padded is None else lazy.cast(padded, lazy.int32)[: cu.size - 1]
        tokens = call.Q.shape[0]
        return cls(cu, starts, lengths(cu), tokens, min(int(call.max_seqlen_q), tokens))

    def rows(self, x: Tensor) -> Tensor:
        """``[t, h, d] -> [b, h, longest, d]``."""
        return lazy.permute(in_rows(x, self.cu, self.longest, self.starts), (0, 2, 1, 3))

    def restore(self, x: Tensor, name: str) -> Tensor:
        """The inverse of ``rows``, 0 where no sequence is."""
        return in_sequence(lazy.permute(x, (0, 2, 1, 3)), self.cu, self.tokens, self.starts)


def gathered(pages: Tensor, table: Tensor, name: str, longest: int) -> Tensor:
    """The tokens of each of the table's sequences, ``[b, g, t, d]``: all that its row reaches, and at most ``longest``, where that is known.

    Entries that stand for no page read some page, which no length reaches.
    """
    x = from_heads_first(heads_first(pages, name), "BSHD")
    count, size, g, d = x.shape
    reached = table.shape[1] * size
    tokens = min(reached, longest) if longest > 0 else reached
    if not count or not tokens:
        return lazy.zeros((table.shape[0], g, tokens, d), x.dtype)
    wanted = lazy.maximum(lazy.minimum(lazy.cast(table, lazy.int32), count - 1), 0)
    found = lazy.reshape(lazy.gather(x, 0, wanted), (table.shape[0], reached, g, d))
    return lazy.permute(found[:, :tokens], (0, 2, 1, 3))


def put(call: CallArguments, name: str) -> None:
    """``copy_to_kv_cache``. To memory that has been written no more is: what reads it after the first time would have to be waited for."""
    k, v = (memory_of(cache) for cache in (call.k_cache, call.v_cache))
    served = name == "THD" and not call.is_non_paged and cpp_extensions.available and native.takes(call.k_cache)
    if served and k is not None and v is not None and k[1] is None and v[1] is None:
        _write(call, k[0], v[0])
    else:
        _look_up(call, name)


def _write(call: CallArguments, k: Tensor, v: Tensor) -> None:
    """By the kernels, to the memory of the caches."""
    new_k, new_v = (lazy.cast(new, call.k_cache.dtype) for new in (call.new_k, call.new_v))
    new_lengths, cached_lengths = (lazy.cast(x, lazy.int32)[: call.b + 1] for x in (call.cu_new_lens, call.cu_cached_lens))
    table = lazy.cast(lazy.reshape(call.page_table, (-1,))[: call.b * call.max_pages_per_seq], lazy.int32)
    tensors = {"new_k": new_k, "k_cache": k, "new_v": new_v, "v_cache": v, "table": lazy.reshape(table, (call.b, call.max_pages_per_seq))}
    lengths = {"new_lengths": new_lengths, "cached_lengths": cached_lengths}
    done = native.call("copy_to_cache", {**tensors, **lengths, "paged": True, "done": native.Result((1,), lazy.int32)})["done"]
    memory = _local.memory
    assert memory is not None
    memory.done.append(done)
    memory.write(call.k_cache, k, done)
    memory.write(call.v_cache, v, done)


def _look_up(call: CallArguments, name: str) -> None:
    """Each place of the caches takes the new token that belongs there, or keeps what it has."""
    b, size = call.b, call.k_cache.shape[1]
    starts, cached = (lazy.cast(x, lazy.int32)[: b + 1] for x in (call.cu_new_lens, call.cu_cached_lens))
    first, count, end = starts[:-1], lengths(starts), lengths(cached)
    sequence, begins, owned = _owners(call, end - count, end)
    position = begins[:, None] + lazy.iota((1, size), 1, lazy.int32)
    of = lazy.gather(end - count, 0, sequence)[:, None]
    written: Any = owned[:, None] & (position >= of) & (position < lazy.gather(end, 0, sequence)[:, None])
    if name == "THD":
        source = lazy.gather(first, 0, sequence)[:, None] + position - of
    elif name == "SBHD":
        source = (position - of) * call.new_k.shape[1] + sequence[:, None]
    else:
        source = sequence[:, None] * call.new_k.shape[1] + position - of
    source = lazy.where(written, source, 0)
    for new, cache in ((call.new_k, call.k_cache), (call.new_v, call.v_cache)):
        tokens = lazy.reshape(new, (math.prod(new.shape[:-2]), *cache.shape[2:]))
        if not tokens.shape[0]:
            tokens = lazy.zeros((1, *cache.shape[2:]), cache.dtype)
        taken = lazy.cast(lazy.gather(tokens, 0, source), cache.dtype)
        cache.assign_(lazy.where(written[:, :, None, None], taken, _former(call, cache)))


def _former(call: CallArguments, cache: Tensor) -> Tensor:
    """The cache as it was; of one without pages, each sequence's row from where the table has it."""
    if not call.is_non_paged or call.page_table is None:
        return cache
    rows = lazy.cast(lazy.reshape(call.page_table, (-1,))[: call.b], lazy.int32)
    moved = lazy.gather(cache, 0, rows)
    return moved if call.b == cache.shape[0] else lazy.concatenate([moved, cache[call.b :]], 0)


def _owners(call: CallArguments, begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each page: the sequence that writes to it, the position of its first token there, and whether there is such a sequence."""
    pages, size = call.k_cache.shape[:2]
    page = lazy.iota((pages,), 0, lazy.int32)
    if call.is_non_paged:
        return lazy.minimum(page, call.b - 1), lazy.zeros((pages,), lazy.int32), page < call.b
    per, entries = call.max_pages_per_seq, call.b * call.max_pages_per_seq
    table = lazy.reshape(lazy.cast(lazy.reshape(call.page_table, (-1,))[:entries], lazy.int32), (call.b, per))
    opens = lazy.iota((1, per), 1, lazy.int32) * size
    # Entries past a sequence's last page stand for none, whatever their number.
    touched: Any = (opens < end[:, None]) & (opens + size > begin[:, None])
    here: Any = lazy.reshape(touched, (1, entries)) & (lazy.reshape(table, (1, entries)) == page[:, None])
    entry = lazy.max(lazy.where(here, lazy.iota((1, entries), 1, lazy.int32), -1), 1)
    known = lazy.maximum(entry, 0)
    sequence = known // per
    return sequence, (known - sequence * per) * size, entry >= 0
