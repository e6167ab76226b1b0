"""Attention over sequences of which each process of a group has a part (context parallelism).

A sequence is cut into ``2 n`` equal parts, of which rank r of n processes has the r-th and the r-th last: so under a causal mask all of them have
equally much to do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self

from fusible import nvte
from fusible.errors import ArgumentError, expected
from fusible.nvte import DType
from fusible.ops.attention import DotProductAttention, heads_side_by_side
from fusible.ops.messages import Communicates, Message
from fusible.ops.op import Context, Op
from fusible.ops.protocols import CachedKeys
from fusible.ops.sharing import Part, Process

__all__ = ["AllToAllAttention", "ContextParallelAttention", "RingAttention"]


class ContextParallelAttention(Communicates, DotProductAttention):
    """Base: ``DotProductAttention`` whose x and y are the tokens of this process; all sequences are of one length."""

    process: Process

    @classmethod
    def of(cls, op: DotProductAttention, group: Any, process: Process) -> Self:
        """The same attention, in ``process`` of ``group``. Raises ``ArgumentError`` or ``ShapeError`` where it cannot be divided so."""
        if op.side_inputs:
            do = "leave out the mask, or the context parallelism"
            raise ArgumentError(expected("attention without a mask", of="context parallelism", got=repr(op), do=do))
        cls.check(op, process)
        made = object.__new__(cls)
        vars(made).update(vars(op), group=group, process=process)
        return made

    @classmethod
    @abstractmethod
    def check(cls, op: DotProductAttention, process: Process) -> None:
        """Raise where ``op`` cannot be divided so between as many processes as ``process`` is one of."""

    @property
    def kind(self) -> type[Op]:
        return DotProductAttention

    @property
    def cached(self) -> CachedKeys | None:
        return None

    def inference(self, x: nvte.Tensor, *, sequences: nvte.Sequences, **sides: nvte.Tensor) -> nvte.Tensor:
        return self.forward(x, sequences=sequences, **sides)[0]

    @property
    def widths(self) -> list[int]:
        """The columns of q, of k and of v."""
        return [part.width for part in heads_side_by_side(self.heads, self.groups, self.head_width)]

    def halves(self, sequences: nvte.Sequences) -> int:
        """The length of each of the two parts of a sequence that this process has. Raises ``ArgumentError`` where there are no two equal ones."""
        if not sequences.uniform or sequences.max_seqlen % 2:
            wanted, got = "sequences of one length, two equal parts of each", "several lengths" if not sequences.uniform else sequences.max_seqlen
            do = "give what local_batch gives of x [batch, tokens, hidden]"
            raise ArgumentError(expected(wanted, of=f"a call of {self!r}", got=got, do=do))
        return sequences.max_seqlen // 2


class AllToAllAttention(ContextParallelAttention):
    """Each process gathers the whole sequences of its share of the heads, attends to them, and gives the others their tokens back (DeepSpeed Ulysses,
    Jacobs et al. 2023, arXiv:2309.14509)."""

    @classmethod
    def check(cls, op: DotProductAttention, process: Process) -> None:
        for part in heads_side_by_side(op.heads, op.groups, op.head_width):
            Part(part.units, part.unit, part.name).of(process)

    @property
    def _own(self) -> DotProductAttention:
        """The attention of this process's heads, on whole sequences."""
        own = object.__new__(DotProductAttention)
        options = {name: value for name, value in vars(self).items() if name not in ("group", "process")}
        vars(own).update(options, y_dtype=self.activation, dx_dtype=self.activation)
        return own.share(self.process)

    def _whole(self, sequences: nvte.Sequences, like: nvte.Tensor) -> nvte.Sequences:
        return nvte.Sequences.equal(sequences.count, sequences.max_seqlen * self.process.size, like)

    def _gather(self, x: nvte.Tensor, widths: Sequence[int], count: int) -> nvte.Tensor:
        """Rows of this process with the columns of all heads (parts of ``widths`` side by side), as rows of all with the columns of its heads."""
        size, rows = self.process.size, x.shape[0]
        own, length = sum(widths) // size, rows // count // 2
        parts = [nvte.reshape(part, (rows, size, width // size)) for part, width in zip(nvte.split(x, list(widths), 1), widths, strict=True)]
        came = nvte.all_to_all(nvte.permute(_joined(parts, 2), (1, 0, 2)), self.group)
        by_half = nvte.permute(nvte.reshape(came, (size, count, 2, length, own)), (2, 0, 1, 3, 4))
        first, second = (nvte.reshape(half, (size, count, length, own)) for half in nvte.split(by_half, [1, 1], 0))
        in_order = nvte.permute(_joined([first, _reversed(second)], 0), (1, 0, 2, 3))
        return nvte.reshape(in_order, (size * rows, own))

    def _scatter(self, x: nvte.Tensor, widths: Sequence[int], count: int) -> nvte.Tensor:
        """The inverse of ``_gather``."""
        size, rows, own = self.process.size, x.shape[0] // self.process.size, x.shape[1]
        length = rows // count // 2
        by_part = nvte.permute(nvte.reshape(x, (count, 2 * size, length, own)), (1, 0, 2, 3))
        first, second = nvte.split(by_part, [size, size], 0)
        by_half = nvte.reshape(_joined([first, _reversed(second)], 0), (2, size, count, length, own))
        sent = nvte.reshape(nvte.permute(by_half, (1, 2, 0, 3, 4)), (size, rows, own))
        came = nvte.permute(nvte.all_to_all(sent, self.group), (1, 0, 2))
        parts = nvte.split(came, [width // size for width in widths], 2)
        return _joined([nvte.reshape(part, (rows, width)) for part, width in zip(parts, widths, strict=True)], 1)

    def forward(self, x: nvte.Tensor, *, sequences: nvte.Sequences, **sides: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        self.halves(sequences)
        whole = self._whole(sequences, x)
        y, ctx = self._own.forward(self._gather(nvte.cast_checked(x, self.x_dtype), self.widths, sequences.count), sequences=whole, **sides)
        return nvte.cast_checked(self._scatter(y, self.widths[:1], sequences.count), self.y_dtype), ctx

    def backward(self, ctx: Context, dy: nvte.Tensor, *, sequences: nvte.Sequences, seed: nvte.Tensor | None = None) -> Any:
        whole = self._whole(sequences, dy)
        dy = self._gather(nvte.cast_checked(dy, self.dy_dtype), self.widths[:1], sequences.count)
        dx, _ = self._own.backward(ctx, dy, sequences=whole, seed=seed)
        return nvte.cast_checked(self._scatter(dx, self.widths, sequences.count), self.dx_dtype), []

    def messages(self, kind: nvte.PassKind, rows: int) -> Iterator[Message]:
        x, y = sum(self.widths), self.widths[0]
        sent = [("dy", y, self.dy_dtype), ("dx", x, self.activation)] if kind == "backward" else [("x", x, self.x_dtype), ("y", y, self.activation)]
        for what, width, type in sent:
            yield Message("all_to_all", what, rows * width * nvte.bit_width(nvte.element(type or self.activation)) // 8)


class RingAttention(ContextParallelAttention):
    """Keys and values go round the processes, each of which attends to them with its own queries, and adds up (Liu et al. 2023, arXiv:2310.01889; in
    two parts, Brandon et al. 2023, arXiv:2311.09431). In backward their gradients go round with them."""

    @classmethod
    def check(cls, op: DotProductAttention, process: Process) -> None:
        refused = {"a window": op.window_size != nvte.EVERYWHERE, "ALiBi": op.scores.alibi_slopes is not None, "dropout": op.scores.dropout > 0}
        found = [name for name, there in refused.items() if there]
        if found:
            do = "leave it out, or share sequences out by all_to_all"
            raise ArgumentError(expected("attention without it", of=f"{found[0]} in ring attention", got=repr(op), do=do))

    def forward(self, x: nvte.Tensor, *, sequences: nvte.Sequences, **sides: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        half = self.halves(sequences)
        q, k, v = self._heads(x)
        if self.rotary is not None:
            q, k = (nvte.rope(heads, sequences, self.rotary, part=self.process) for heads in (q, k))
        q, k, v = (self._wide(self._quantized(part)) for part in (q, k, v))
        kv, o, aux = nvte.concatenate([k, v], 1), None, None
        for step in range(self.process.size):
            kv = nvte.ring_shift(kv, self.group) if step else kv
            block = _Block(self, step, sequences, half)
            o_step, aux_step = nvte.attention(
                *block.taken(q, kv), block.queries, self.scale, block.causal, True, options=self.options, keys=block.keys
            )
            o_step = nvte.cast_checked(o_step, nvte.accumulator(o_step.type))
            if o is None or aux is None:
                o, aux = o_step, aux_step
            else:
                o, stats = block.merged(o, aux.stats, o_step, aux_step.stats)
                aux = nvte.AttentionAux(stats, aux.rng_state)
        assert o is not None and aux is not None
        o = nvte.cast_checked(o, q.type)
        found = {"q": q, "k": k, "v": v, "o": o, "stats": aux.stats, "rng_state": aux.rng_state}
        return self._side_by_side([o], self.y_dtype), {name: tensor for name, tensor in found.items() if tensor is not None}

    def backward(self, ctx: Context, dy: nvte.Tensor, *, sequences: nvte.Sequences, seed: nvte.Tensor | None = None) -> Any:
        half, q, o, kv = self.halves(sequences), ctx["q"], ctx["o"], nvte.concatenate([ctx["k"], ctx["v"]], 1)
        do = nvte.cast_checked(nvte.reshape(nvte.cast_checked(dy, self.dy_dtype), (q.shape[0], self.heads, self.head_width)), q.type)
        dq: nvte.Tensor | None = None
        dkv: nvte.Tensor | None = None
        for step in range(self.process.size):
            kv = nvte.ring_shift(kv, self.group) if step else kv
            dkv = nvte.ring_shift(dkv, self.group) if dkv is not None else None
            block = _Block(self, step, sequences, half)
            aux = nvte.AttentionAux(block.of_stats(ctx["stats"]), ctx.get("rng_state"))
            of_queries = (block.of_queries(tensor) for tensor in (do, o))
            dq_step, dk, dv, _ = nvte.dattention(
                next(of_queries),
                *block.taken(q, kv),
                next(of_queries),
                aux,
                block.queries,
                self.scale,
                block.causal,
                options=self.options,
                keys=block.keys,
            )
            dq = _sum(dq, block.as_queries(dq_step))
            dkv = _sum(dkv, block.as_keys(nvte.concatenate([dk, dv], 1)))
        assert dq is not None and dkv is not None
        dk, dv = nvte.split(nvte.ring_shift(dkv, self.group), [self.groups, self.groups], 1)
        dq, dk, dv = (nvte.cast_checked(d, q.type) for d in (dq, dk, dv))
        if self.rotary is not None:
            dq, dk = (nvte.drope(d, sequences, self.rotary, self.process) for d in (dq, dk))
        return self._side_by_side([dq, dk, dv], self.dx_dtype), []

    def messages(self, kind: nvte.PassKind, rows: int) -> Iterator[Message]:
        elements, size = rows * 2 * self.groups * self.head_width, self.process.size
        type = self.activation if self.qkv_dtype is None else DType.Float32
        sent = elements * nvte.bit_width(nvte.element(type)) // 8
        summed = elements * nvte.bit_width(nvte.element(nvte.accumulator(type))) // 8
        for _ in range(size - 1):
            yield Message("ring_shift", "k and v", sent)
            if kind == "backward":
                yield Message("ring_shift", "dk and dv", summed)
        if kind == "backward":
            yield Message("ring_shift", "dk and dv", summed)


class _Block:
    """A step of ring attention: which of the process's queries see which of the keys that have come from ``step`` processes before.

    Under a causal mask its own tokens are in order, and so hidden as one sequence's. From an earlier rank all queries see the first part of the keys,
    and none the second; from a later one the second part of the queries sees all keys, and the first none.
    """

    def __init__(self, op: RingAttention, step: int, sequences: nvte.Sequences, half: int) -> None:
        self.causal = op.causal and step == 0
        part = op.causal and step > 0
        self._second_queries, self._first_keys = part and step > op.process.rank, part and step <= op.process.rank
        self._all, self._half, self._groups = sequences, half, op.groups
        self._like = sequences.cu_seqlens
        self.queries, self.keys = (self._short if short else sequences for short in (self._second_queries, self._first_keys))

    @property
    def _short(self) -> nvte.Sequences:
        return nvte.Sequences.equal(self._all.count, self._half, self._like)

    def taken(self, q: nvte.Tensor, kv: nvte.Tensor) -> tuple[nvte.Tensor, nvte.Tensor, nvte.Tensor]:
        """The queries, keys and values of the step."""
        k, v = nvte.split(self._parts(kv)[0] if self._first_keys else kv, [self._groups, self._groups], 1)
        return self.of_queries(q), k, v

    def of_queries(self, x: nvte.Tensor) -> nvte.Tensor:
        return self._parts(x)[1] if self._second_queries else x

    def of_stats(self, stats: nvte.Tensor) -> nvte.Tensor:
        return nvte.split(stats, [self._half, self._half], 2)[1] if self._second_queries else stats

    def as_queries(self, dq: nvte.Tensor) -> nvte.Tensor:
        """A gradient of the step's queries as one of all."""
        return self._whole(_zeros(dq), dq) if self._second_queries else dq

    def as_keys(self, dkv: nvte.Tensor) -> nvte.Tensor:
        return self._whole(dkv, _zeros(dkv)) if self._first_keys else dkv

    def merged(self, o: nvte.Tensor, stats: nvte.Tensor, o_step: nvte.Tensor, stats_step: nvte.Tensor) -> tuple[nvte.Tensor, nvte.Tensor]:
        if not self._second_queries:
            return nvte.merge_attention(o, stats, o_step, stats_step, self._all)
        first, second = self._parts(o)
        of_first, of_second = nvte.split(stats, [self._half, self._half], 2)
        second, of_second = nvte.merge_attention(second, of_second, o_step, stats_step, self._short)
        return self._whole(first, second), nvte.concatenate([of_first, of_second], 2)

    def _parts(self, x: nvte.Tensor) -> list[nvte.Tensor]:
        """The first and the second part of each sequence."""
        count, half, rest = self._all.count, self._half, x.shape[1:]
        parts = nvte.split(nvte.reshape(x, (count, 2, half, *rest)), [1, 1], 1)
        return [nvte.reshape(part, (count * half, *rest)) for part in parts]

    def _whole(self, first: nvte.Tensor, second: nvte.Tensor) -> nvte.Tensor:
        """The inverse of ``_parts``."""
        count, half, rest = self._all.count, self._half, first.shape[1:]
        both = nvte.concatenate([nvte.reshape(part, (count, 1, half, *rest)) for part in (first, second)], 1)
        return nvte.reshape(both, (count * 2 * half, *rest))


def _joined(parts: Sequence[nvte.Tensor], dim: int) -> nvte.Tensor:
    return nvte.concatenate(parts, dim) if len(parts) > 1 else parts[0]


def _reversed(x: nvte.Tensor) -> nvte.Tensor:
    """The entries of the first dimension in reverse."""
    return _joined(nvte.split(x, [1] * x.shape[0], 0)[::-1], 0)


def _zeros(x: nvte.Tensor) -> nvte.Tensor:
    return nvte.zeros(x.shape, nvte.element(x.type), x)


def _sum(total: nvte.Tensor | None, x: nvte.Tensor) -> nvte.Tensor:
    """``total + x`` in the type in which ``x`` is summed."""
    wide = nvte.accumulator(x.type)
    return nvte.cast_checked(x, wide) if total is None else nvte.add(total, x, wide)
