"""Tensor parallelism as a rewriting of the op list: what each op of a list becomes in one process of a group (Shoeybi et al. 2019, arXiv:1909.08053).

From one norm or residual to the next, the first product gives each process its share of the columns (``ColumnParallelMMT``), what follows computes
on that, and the last product sums what all processes made (``RowParallelMMT``). With sequence parallelism (Korthikanti et al. 2022,
arXiv:2205.05198) processes share out the rows of everything else. Made of the ops and the size of the group alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fusible.compute_pipeline.mixtures import of_mixtures
from fusible.errors import ArgumentError, expected
from fusible.ops import MMT, ColumnParallelMMT, GatherRows, Op, ParallelMMT, RowParallelMMT, ScatterRows
from fusible.ops.protocols import OpaqueCode
from fusible.ops.sharing import Part, Parts, Process, RowShare, SharesColumns

__all__ = ["Holding", "Rewritten", "between_rows", "tensor_parallel"]


@dataclass(frozen=True)
class Holding:
    """What each process of a group holds of a parameter. ``dim``: along which it is shared out, in ``parts``; None where each process has all of it.
    ``partial``: whether the gradient that a process computes is a part of a sum over the group."""

    dim: int | None = None
    parts: Parts = ()
    partial: bool = False


@dataclass(frozen=True)
class Rewritten:
    """What an op of the list becomes in one process. ``op``: its parameters are still whole. ``holdings``: of its parameters, by their names.
    ``shared``: whether it computes a share of the columns."""

    op: Op
    holdings: Mapping[str, Holding]
    shared: bool = False


@dataclass(frozen=True)
class _Span:
    """Ops ``[start, stop)`` that each process computes its share of the columns of. ``parts``: of the x of each op, and of the last one's y."""

    start: int
    stop: int
    parts: tuple[Parts, ...]
    summed: bool
    """Whether the last op is a product that sums what the processes have; else y stays shared out."""


def tensor_parallel(
    ops: Sequence[Op], process: Process, group: Any, *, sequence_parallel: bool = False, shared_output: bool = False
) -> list[Rewritten]:
    """What each of ``ops`` becomes in ``process``. ``group``: of the processes, as collectives take it.

    ``sequence_parallel``: processes share out the rows between the spans whose columns they share out. x and y of the whole list are those of all
    rows. ``shared_output``: the last product, where it is the end of the list but for its bias, leaves each process its share of y's columns.

    Raises ``ShapeError`` where columns or heads cannot be shared out equally, ``ArgumentError`` for an op that cannot work on some of the rows.
    """
    spans = _spans(ops, shared_output)
    for span in spans:
        for parts in span.parts:
            for part in parts:
                part.of(process)
    by_start = {span.start: span for span in spans}
    rows = RowShare(group, process, True, True) if sequence_parallel else None
    result: list[Rewritten] = []
    mixed = of_mixtures(ops)
    while len(result) < len(ops):
        i = len(result)
        span = by_start.get(i)
        result += [_alone(ops[i], rows, mixed[i])] if span is None else _of_span(ops, span, process, group, rows)
    return result


def between_rows(ops: Sequence[Op]) -> list[Op | None]:
    """What scatters or gathers rows before each of ``ops``, and behind the last: x and y of the whole list are those of all rows."""
    found: list[Op | None] = []
    last: RowShare | None = None
    for op in ops:
        share = op.row_share
        if (share is not None and share.x) == (last is not None):
            found.append(None)
        else:
            found.append(_gathers(last.group, last.process) if last is not None else _scatters(share.group, share.process))  # type: ignore[union-attr]
        last = share if share is not None and share.y else None
    return [*found, None if last is None else _gathers(last.group, last.process)]


@cache
def _scatters(group: Any, process: Process) -> Op:
    return ScatterRows(group, process)


@cache
def _gathers(group: Any, process: Process) -> Op:
    return GatherRows(group, process)


def _alone(op: Op, rows: RowShare | None, of_mixture: bool) -> Rewritten:
    """An op whose columns are not shared out. Where each process has its own rows, the gradients of its parameters are sums over the group."""
    if rows is None:
        return Rewritten(op, dict.fromkeys(op.arg_names, Holding()))
    if not (op.rows_alone or of_mixture) or isinstance(op, OpaqueCode):
        do = "leave out sequence_parallel, or put it between two products whose columns are shared out"
        raise ArgumentError(expected("an op that computes each row from that row alone", of="a list with sequence parallelism", got=repr(op), do=do))
    return Rewritten(op.with_(row_share=rows), dict.fromkeys(op.arg_names, Holding(partial=True)))


def _spans(ops: Sequence[Op], shared_output: bool) -> list[_Span]:
    found: list[_Span] = []
    i = 0
    while i < len(ops):
        span = _span_at(ops, i, shared_output) if _is_product(ops[i]) else None
        if span is None:
            i += 1
        else:
            found.append(span)
            i = span.stop
    return found


def _is_product(op: Op) -> bool:
    return isinstance(op, MMT) and not isinstance(op, ParallelMMT)


def _span_at(ops: Sequence[Op], start: int, shared_output: bool) -> _Span | None:
    """From the product at ``start`` to the next product, where each process can compute its share of what is between; or to the end."""
    stop = start + 1
    while stop < len(ops) and isinstance(ops[stop], SharesColumns) and not (ops[stop].side_inputs or ops[stop].side_outputs):
        stop += 1
    if stop < len(ops) and _is_product(ops[stop]):
        parts = _parts_back(ops[start + 1 : stop], (Part(ops[stop].args[0].shape[1]),))
        return None if parts is None else _Span(start, stop + 1, ((), *parts, ()), True)
    if stop == len(ops) and shared_output:
        width = ops[start].args[0].shape[0]
        for op in ops[start + 1 :]:
            width = op.width(width) or 0
        parts = _parts_back(ops[start + 1 :], (Part(width),))
        return None if parts is None else _Span(start, stop, ((), *parts), False)
    return None


def _parts_back(ops: Sequence[Op], y: Parts) -> list[Parts] | None:
    """The parts of each op's x, and ``y``, those of the last one's y; None where an op cannot be divided so."""
    found = [y]
    for op in reversed(ops):
        assert isinstance(op, SharesColumns)
        parts = op.parts_of_x(found[0])
        if parts is None:
            return None
        found.insert(0, parts)
    return found


def _of_span(ops: Sequence[Op], span: _Span, process: Process, group: Any, rows: RowShare | None) -> list[Rewritten]:
    result: list[Rewritten] = []
    for i in range(span.start, span.stop):
        op, x, y = ops[i], span.parts[i - span.start], span.parts[i - span.start + 1]
        if i == span.start:
            made = _product(ColumnParallelMMT, op, process, group, rows, x=True)
            result.append(Rewritten(made, {"weight": Holding(0, y, _repeated(y, process))}, shared=True))
        elif i == span.stop - 1 and span.summed:
            result.append(Rewritten(_product(RowParallelMMT, op, process, group, rows, x=False), {"weight": Holding(1, x)}, shared=True))
        else:
            assert isinstance(op, SharesColumns)
            own = {name: Holding(0, x, _repeated(x, process)) if name in op.by_columns else Holding(partial=True) for name in op.arg_names}
            result.append(Rewritten(op.share(process), own, shared=True))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    return result


def _repeated(parts: Parts, process: Process) -> bool:
    """Whether several processes have the same columns of a part, so that its gradient is a sum over them."""
    return not all(part.shared(process.size) for part in parts)


def _product(kind: type[ParallelMMT], op: Op, process: Process, group: Any, rows: RowShare | None, *, x: bool) -> ParallelMMT:
    """``x``: whether x is what has rows of this process alone, where rows are shared out; else y."""
    types = {name: value for name, value in vars(op).items() if name.endswith("_dtype")}
    made = kind(op.args[0], group=group, sequence_parallel=rows is not None, process=process, **types).with_(layer=op.layer)
    return made if rows is None else made.with_(row_share=rows._replace(x=x, y=not x))
