"""Primitives between the processes of a group, by ``torch.distributed``. Of tensors on the device ``meta`` nothing is sent: the result has a shape
alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.tex.interface.prim import Prim
from fusible.tex.protocol import PlannedGroup, accumulator, check_shape, process_group

__all__ = ["CollectiveKernels"]

# Newer releases of torch have renamed the two, and warn of the old names.
_torch_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_torch_all_reduce, _all_to_all = dist.all_reduce, dist.all_to_all_single
_REDUCTIONS = ("sum", "max", "mean")


class CollectiveKernels(Prim):
    def prim_all_gather(self, x: Tensor, group: Any = None) -> Any:
        return _begin_gather(x, group, "prim.all_gather")[0]

    def prim_reduce_scatter(self, x: Tensor, group: Any = None) -> Any:
        return _begin_reduce_scatter(x, group, "prim.reduce_scatter")[0]

    def prim_all_reduce(self, x: Tensor, group: Any = None, reduction: str = "sum") -> Any:
        if reduction not in _REDUCTIONS:
            of = "the reduction of prim.all_reduce"
            raise ArgumentError(expected(f"one of {', '.join(_REDUCTIONS)}", of=of, got=repr(reduction), do="name one of these"))
        return _begin_reduce(x, group, "prim.all_reduce", reduction=reduction)[0]

    def prim_begin_all_gather(self, x: Tensor, group: Any = None) -> tuple[Any, Any]:
        return _begin_gather(x, group, "prim.begin_all_gather", behind=True)

    def prim_begin_reduce_scatter(self, x: Tensor, group: Any = None) -> tuple[Any, Any]:
        return _begin_reduce_scatter(x, group, "prim.begin_reduce_scatter", behind=True)

    def prim_begin_all_reduce(self, x: Tensor, group: Any = None) -> tuple[Any, Any]:
        return _begin_reduce(x, group, "prim.begin_all_reduce", behind=True)

    def prim_end_collective(self, x: Tensor, work: Any) -> Any:
        if work is not None:
            work.wait()
        return x

    def prim_all_to_all(self, x: Tensor, group: Any = None) -> Any:
        group = process_group(group)
        size = _size(group, "prim.all_to_all")
        _check_parts(x, size, "prim.all_to_all")
        if size == 1:
            return x
        came = torch.empty_like(x, memory_format=torch.contiguous_format)
        if not x.is_meta:
            dist.all_to_all_single(came, x.contiguous(), group=group)
        return came

    def prim_ring_shift(self, x: Tensor, group: Any = None) -> Any:
        group = process_group(group)
        size = _size(group, "prim.ring_shift")
        if size == 1:
            return x
        sent, came = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.is_meta:
            return came
        rank = dist.get_rank(group)
        members = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        ways = (dist.isend, sent, members[(rank + 1) % size]), (dist.irecv, came, members[(rank - 1) % size])
        for work in dist.batch_isend_irecv([dist.P2POp(*way, group=group) for way in ways]):
            work.wait()
        return came

    def prim_exchange_groups(self, x: Tensor, sizes: Tensor, group: Any = None) -> tuple[Any, Any]:
        group = process_group(group)
        size = _size(group, "prim.exchange_groups")
        _check_parts(sizes, size, "prim.exchange_groups", "sizes")
        _check_groups(x, sizes, "x of prim.exchange_groups")
        sent = sizes.to(torch.int64).view(size, -1)
        counts = sent
        if size > 1:
            counts = torch.empty_like(sent)
            dist.all_to_all_single(counts, sent.contiguous(), group=group)
        came = _exchanged(x, sent, counts, group)
        return _in_order(came, counts), counts

    def prim_return_groups(self, y: Tensor, sizes: Tensor, counts: Tensor, group: Any = None) -> Any:
        group = process_group(group)
        size = _size(group, "prim.return_groups")
        _check_parts(sizes, size, "prim.return_groups", "sizes")
        _check_groups(y, counts, "y of prim.return_groups")
        check_shape(counts, (size, len(sizes) // size), "counts of prim.return_groups")
        return _exchanged(_in_order(y, counts.T), counts, sizes.to(torch.int64).view(size, -1), group)


def _begin_gather(x: Tensor, group: Any, of: str, *, behind: bool = False) -> tuple[Tensor, Any]:
    """The result and, where it is computed ``behind`` what follows, what to wait for."""
    group = process_group(group)
    size = _size(group, of)
    _check_rows(x, of)
    if size == 1:
        return x, None
    whole = x.new_empty((size * x.shape[0], *x.shape[1:]))
    return whole, None if x.is_meta else _all_gather(whole, x.detach().contiguous(), group=group, async_op=behind)


def _begin_reduce_scatter(x: Tensor, group: Any, of: str, *, behind: bool = False) -> tuple[Tensor, Any]:
    group = process_group(group)
    size = _size(group, of)
    _check_parts(x, size, of)
    if size == 1:
        return x, None
    part = x.new_empty((x.shape[0] // size, *x.shape[1:]))
    return part, None if x.is_meta else _reduce_scatter(part, x.detach().contiguous(), group=group, async_op=behind)


def _begin_reduce(x: Tensor, group: Any, of: str, *, reduction: str = "sum", behind: bool = False) -> tuple[Tensor, Any]:
    group = process_group(group)
    size = _size(group, of)
    if size == 1:
        return x, None
    own = x.detach().to(accumulator(x.dtype) if reduction == "mean" else x.dtype).contiguous()
    kind = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
    result, work = (torch.empty_like(own), None) if x.is_meta else _all_reduce(own, kind, group=group, async_op=behind)
    return result.div_(size).to(x.dtype) if reduction == "mean" else result, work


# On CPUs gloo's rings take a round for each process, and a round wakes threads: one `all_to_all`, of as many bytes in one round, is there sooner. Two
# processes send each other what they have; of more, sums of rows alone are made so.


def _all_gather(whole: Tensor, x: Tensor, *, group: Any, async_op: bool) -> Any:
    if not _of_two(x, group):
        return _torch_all_gather(whole, x, group=group, async_op=async_op)
    rank, parts = dist.get_rank(group), whole.view(2, *x.shape)
    parts[rank].copy_(x)
    return _swap(parts[1 - rank], x, group, async_op)


def _reduce_scatter(part: Tensor, x: Tensor, *, group: Any, async_op: bool) -> Any:
    """The process's own rows of the sum, into ``part``; on CPUs 16 bits are added up in fp32 then, and rounded once."""
    if not (x.is_cpu and x.is_floating_point()):
        return _torch_reduce_scatter(part, x, group=group, async_op=async_op)
    parts = x.new_empty((dist.get_world_size(group), *part.shape))
    return _then(_all_to_all(parts.view(x.shape), x, group=group, async_op=async_op), partial(_add_up, parts, part))


def _all_reduce(x: Tensor, kind: Any, *, group: Any, async_op: bool) -> tuple[Tensor, Any]:
    """The result, and what to wait for."""
    if kind == dist.ReduceOp.SUM and _of_two(x, group):
        other = torch.empty_like(x)
        return other, _then(_swap(other, x, group, async_op), partial(torch.add, x, other, out=other))
    result = x.clone()
    return result, _torch_all_reduce(result, kind, group=group, async_op=async_op)


def _of_two(x: Tensor, group: Any) -> bool:
    return x.is_cpu and dist.get_world_size(group) == 2


def _swap(came: Tensor, x: Tensor, group: Any, async_op: bool) -> Any:
    """What the other of two processes has of ``x``, into ``came``."""
    splits = [x.numel(), 0] if dist.get_rank(group) else [0, x.numel()]
    return _all_to_all(came.view(-1), x.view(-1), splits, splits, group=group, async_op=async_op)


def _add_up(parts: Tensor, into: Tensor) -> None:
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=into)
    else:
        into.copy_(parts.sum(0, dtype=accumulator(parts.dtype)))


@dataclass(frozen=True)
class _Then:
    """What is done when the ``work`` of a collective that was begun is. No tuple: a replay would take it to pieces."""

    work: Any
    finish: Callable[[], object]

    def wait(self) -> None:
        self.work.wait()
        self.finish()


def _then(work: Any, finish: Callable[[], object]) -> _Then | None:
    """``finish`` when ``work`` is done; at once where it is None, for that has been waited for."""
    if work is not None:
        return _Then(work, finish)
    finish()
    return None


def _size(group: Any, of: str) -> int:
    """The number of processes in a group. Raises ``ArgumentError`` where there is none, or this one is not in it."""
    if isinstance(group, PlannedGroup):
        return group.size
    if not dist.is_available() or not dist.is_initialized():
        do = "call torch.distributed.init_process_group first"
        raise ArgumentError(expected("processes that know one another", of=of, got="no process group", do=do))
    size = dist.get_world_size(group)
    if size < 1:
        raise ArgumentError(expected("a group that this process belongs to", of=of, got="another", do="call it in the processes of the group alone"))
    return size


def _check_parts(x: Tensor, size: int, of: str, name: str = "x") -> None:
    _check_rows(x, of)
    if x.shape[0] % size:
        do = f"give a multiple of {size}, the processes of the group"
        raise ShapeError(expected(f"a first dimension that {size} divides", of=f"{name} of {of}", got=list(x.shape), do=do))


def _check_groups(x: Tensor, sizes: Tensor, of: str) -> None:
    """Raise ``ShapeError`` unless the groups have all rows of ``x``, and none has fewer than 0."""
    rows = int(sizes.sum())
    if rows != len(x) or (sizes < 0).any():
        raise ShapeError(expected(f"{rows} rows, those of the groups", of=of, got=len(x), do="give each row to a group"))


def _exchanged(x: Tensor, sent: Tensor, counts: Tensor, group: Any) -> Tensor:
    """The rows of ``x``, of which rank r gets the ``sent[r]``, summed; it gives the ``counts[r]``."""
    if len(sent) == 1:
        return x
    splits = [each.sum(1).tolist() for each in (counts, sent)]
    came = x.new_empty((sum(splits[0]), x.shape[1]))
    dist.all_to_all_single(came, x.contiguous(), *splits, group=group)
    return came


def _in_order(x: Tensor, counts: Tensor) -> Tensor:
    """Pieces of ``counts [a, b]`` rows, which lie in the order of the first dimension, in that of the second."""
    if 1 in counts.shape:
        return x
    pieces = x.split(counts.flatten().tolist())
    return torch.cat([piece for b in range(counts.shape[1]) for piece in pieces[b :: counts.shape[1]]])


def _check_rows(x: Tensor, of: str) -> None:
    if not x.dim():
        raise ShapeError(expected("at least 1 dimension", of=f"x of {of}", got=list(x.shape), do="reshape it"))
