"""Functions between the processes of a group. Each is called by every process of it; ``group`` is opaque and hashable, None: all processes.

Of a tensor that processes share by rows, rank r has the r-th part. One with a single scale is gathered in 8 bits: every process quantizes its rows by
the same scale, so that the bytes of all are those of the whole. Current scaling takes the group's largest amax for it (``over``); under delayed
scaling the scales are the same where what was observed is (``share_amax``). One whose blocks stand alone, as in MXFP8, is gathered in 8 bits where
none of them lies in several processes (``has_own_blocks``). Any other is gathered first, and quantized then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from fusible import tex
from fusible.errors import ShapeError, expected
from fusible.nvte.dtype import DType, QuantizedType, Type, bit_width, element
from fusible.nvte.execution import current_pass
from fusible.nvte.padding import lacks_blocks
from fusible.nvte.tensor import Tensor
from fusible.quantized import Float8TensorStorage
from fusible.tex.formats import format_of

__all__ = [
    "Underway",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "begin_all_gather",
    "begin_sum",
    "bytes_gathered",
    "exchange_groups",
    "has_own_blocks",
    "over",
    "own_rows",
    "reduce_scatter",
    "return_groups",
    "ring_shift",
    "share_amax",
]

Group: TypeAlias = Any
"""Which processes: what ``tex.prim.all_gather`` takes."""


class Underway(NamedTuple):
    """A tensor that processes exchange while this one computes something else. ``begun``: what each collective gave that is under way."""

    begun: Sequence[tuple[Any, Any]]
    finish: Callable[..., Tensor]

    def end(self) -> Tensor:
        """The tensor, when all of it has come."""
        return self.finish(*[tex.prim.end_collective(*each) for each in self.begun])


def all_gather(x: Tensor, group: Group, *, rowwise: bool = True, columnwise: bool = True) -> Tensor:
    """The rows of all processes: ``[tokens / processes, ..] -> [tokens, ..]``.

    ``x`` is unquantized, or has one scale, the same in all of them, or ``has_own_blocks``: then of its two copies those that are
    there and asked for are gathered.
    """
    sent, finish = _gathering(x, rowwise, columnwise)
    return finish(*[tex.prim.all_gather(part, group) for part in sent])


def begin_all_gather(x: Tensor, group: Group, *, rowwise: bool = True, columnwise: bool = True) -> Underway:
    """``all_gather``, without waiting for it."""
    sent, finish = _gathering(x, rowwise, columnwise)
    return Underway([tex.prim.begin_all_gather(part, group) for part in sent], finish)


def _gathering(x: Tensor, rowwise: bool, columnwise: bool) -> tuple[Sequence[Any], Callable[..., Tensor]]:
    """What is gathered of ``x``, and what makes a tensor of what has come."""
    if not isinstance(x.type, QuantizedType):
        return [x.data], partial(_tensor, x.type)
    storage = x.data
    if format_of(storage).gathers:
        return _gathering_blocks(x, {"rowwise": rowwise and x.type.rowwise, "columnwise": columnwise and x.type.columnwise})
    assert isinstance(storage, Float8TensorStorage), "what has blocks in several processes is gathered before it is quantized"
    type, fields = x.type, {**storage.get_metadata(), "data_transpose": None}

    def finish(whole: Any) -> Tensor:
        of_whole: dict[str, Any] = {**fields, "data": whole}
        return Tensor(Float8TensorStorage(**of_whole), type)

    return [storage._data], finish


def _tensor(type: Type, data: Any) -> Tensor:
    return Tensor(data, type)


def has_own_blocks(shape: Sequence[int], type: Type | None) -> bool:
    """Whether rows ``shape`` of one process can be quantized to ``type`` alone, and be ``all_gather``ed so: each block lies in one process."""
    if not isinstance(type, QuantizedType) or type.blocks is None or not type.blocks.gathers:
        return False
    assert type.quantizer is not None
    return not lacks_blocks(shape, type) and not type.quantizer.optimize_for_gemm


def _gathering_blocks(x: Tensor, copies: dict[str, bool]) -> tuple[Sequence[Any], Callable[..., Tensor]]:
    assert isinstance(x.type, QuantizedType)
    fields, form, type = x.data.get_metadata(), x.type.blocks, x.type.read(**copies)
    assert form is not None
    sent: list[Any] = []
    for way, asked in copies.items():
        data, scales = fields[f"{way}_data"], fields[f"{way}_scale_inv"]
        fields[f"{way}_data"] = fields[f"{way}_scale_inv"] = None
        if asked:
            sent += [data, _lines(scales, form.used_scales(data.shape, way == "columnwise", False)[0])]

    def finish(*came: Any) -> Tensor:
        whole = dict(fields)
        for way, data, scales in zip([way for way, asked in copies.items() if asked], came[::2], came[1::2], strict=True):
            lines = form.scale_shape(data.shape, way == "columnwise", False)[0]
            whole |= {f"{way}_data": data, f"{way}_scale_inv": _lines(scales, lines)}
        return Tensor(x.data.__class__(**whole), type)

    return sent, finish


def bytes_gathered(shape: Sequence[int], type: Type, processes: int, *, rowwise: bool = True, columnwise: bool = True) -> list[int]:
    """The bytes that each collective of ``all_gather`` moves, where each process has rows ``shape`` in ``type``: of what all have together."""
    elements = processes * math.prod(shape)
    if not isinstance(type, QuantizedType) or type.per_tensor:
        return [elements * bit_width(element(type)) // 8]
    form = type.blocks
    assert form is not None
    found: list[int] = []
    for columns in [False] * (rowwise and type.rowwise) + [True] * (columnwise and type.columnwise):
        lines, width = form.used_scales(shape, columns, False)[0], form.scale_shape(shape, columns, False)[1]
        found += [elements * bit_width(element(type)) // 8, processes * lines * width]
    return found


def _lines(x: Any, count: int) -> Any:
    """The first ``count`` lines of a matrix, of zeros where it has fewer."""
    have, width = x.shape
    if have > count:
        return tex.prim.split(x, [count, have - count], 0)[0]
    return tex.prim.concatenate([x, tex.prim.full((count - have, width), 0, DType.Byte, x)], 0) if have < count else x


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """The process's own rows of the sum over the group: ``[tokens, ..] -> [tokens / processes, ..]``; ``x`` is unquantized."""
    return Tensor(tex.prim.reduce_scatter(x.data, group), x.type)


def begin_sum(x: Tensor, group: Group, *, scatter: bool) -> Underway:
    """``reduce_scatter`` (``scatter``) or ``all_reduce``, without waiting for it."""
    begin = tex.prim.begin_reduce_scatter if scatter else tex.prim.begin_all_reduce
    return Underway([begin(x.data, group)], partial(_tensor, x.type))


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """Of ``x [processes, ..]``, unquantized, the r-th entry goes to rank r, and what rank r has for this process comes in its place."""
    return Tensor(tex.prim.all_to_all(x.data, group), x.type)


def ring_shift(x: Tensor, group: Group) -> Tensor:
    """What the process before has of ``x``, unquantized; the next one gets this one's."""
    return Tensor(tex.prim.ring_shift(x.data, group), x.type)


def exchange_groups(x: Tensor, sizes: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """``(y, own, counts)``: of the groups that ``sizes [groups]`` makes of the rows of ``x``, unquantized, rank r gets the r-th of equal shares from
    every process. ``y`` has this process's groups one after another, of ``own`` rows, int64 ``[groups / processes]``; ``counts``, int64 ``[processes,
    groups / processes]``, says how many came from whom."""
    y, counts = tex.prim.exchange_groups(x.data, sizes.data, group)
    own = tex.prim.row_sum(tex.prim.cast(counts, DType.Float32))
    return Tensor(y, x.type), Tensor(tex.prim.cast(own, DType.Int64), DType.Int64), Tensor(counts, DType.Int64)


def return_groups(y: Tensor, sizes: Tensor, counts: Tensor, group: Group) -> Tensor:
    """The inverse of ``exchange_groups``: every row back where it came from."""
    return Tensor(tex.prim.return_groups(y.data, sizes.data, counts.data, group), y.type)


def own_rows(x: Tensor, rank: int, size: int) -> Tensor:
    """The ``rank``-th of ``size`` equal parts of the rows of ``x``, unquantized. Raises ``ShapeError`` where they cannot be shared out equally."""
    rows = x.shape[0]
    if rows % size:
        wanted, do = f"a multiple of {size}, the processes that share them", "give a batch of another size, or do not share rows"
        raise ShapeError(expected(wanted, of="the rows of a sequence-parallel call", got=rows, do=do))
    return Tensor(tex.prim.split(x.data, [rows // size] * size, 0)[rank], x.type)


def all_reduce(x: Tensor, group: Group, reduction: str = "sum") -> Tensor:
    """The sum, ``"max"`` or ``"mean"`` of ``x``, unquantized, over the group, in every process of it."""
    return Tensor(tex.prim.all_reduce(x.data, group, reduction), x.type)


def over(type: Type | None, group: Group) -> Type | None:
    """The type in which each process quantizes its rows, where ``all_gather`` of the rows is to give the whole tensor in ``type``.

    None where a block of the whole may lie in several processes: such a tensor is gathered first, and quantized then.
    """
    if type in (DType.Float8E4M3, DType.Float8E5M2):
        type = QuantizedType(type, "current")  # type: ignore[arg-type]
    if not isinstance(type, QuantizedType) or type.delayed:
        return type
    if not type.per_tensor:
        return None
    assert type.quantizer is not None
    quantizer: Any = type.quantizer.copy()
    quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, group
    return replace(type, quantizer=quantizer)


def share_amax(type: Type | None, group: Group) -> None:
    """Replace the amax that the running pass has observed for ``type``, under delayed scaling, by the largest of the group."""
    state = current_pass()
    if isinstance(type, QuantizedType) and type.slot in state.amaxes and state.kind != "inference":
        state.amaxes[type.slot] = tex.prim.all_reduce(state.amaxes[type.slot], group, "max")
