"""Grouped lazy tensors: many in one, each quantized by itself, whose numbers of rows are not known when a call is recorded.

So the buffers lie as those of one tensor: per-tensor FP8 as that of the logical shape, with a scale for each member; block-scaled formats as that of
the members' rows in tiles of a block's length, so that each member begins with a block of its own, and its last block is completed with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

from fusible import lazy
from fusible.errors import ArgumentError, NotServedError, ShapeError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.block_formats import BLOCKS
from fusible.tex.backends.xla.fp8 import decode, encode, magnitude, scale_from_amax, transpose_bytes
from fusible.tex.backends.xla.groups import Groups, Tiles, groups
from fusible.tex.backends.xla.number_formats import reciprocal
from fusible.tex.backends.xla.nvfp4 import column_source
from fusible.tex.backends.xla.random import next_seed, uniform
from fusible.tex.calls.grouped import build_grouped, group_arguments, member_fields
from fusible.tex.factories import build_quantized
from fusible.tex.formats import CURRENT, PLAIN, BlockFormat, block_format_of, scheme_of, usages
from fusible.tex.formulas.nvfp4 import Random
from fusible.tex.interface.declare import CallArguments
from fusible.tex.protocol import QuantizerLike, fp8_format, to_torch

__all__ = ["group_values", "groups_of", "quantize_group"]


def groups_of(x: Any) -> Groups:
    """The groups of a grouped tensor's rows. Raises ``NotServedError`` for members of different widths."""
    if x.last_dims is not None:
        raise NotServedError(expected("members of one width", of="a grouped lazy tensor", got="last_dims", do="group rows"))
    return _groups(x.logical_shape, x.num_tensors, x.first_dims, x.tensor_offsets)


def _groups(shape: Sequence[int], count: int, first_dims: Tensor | None, tensor_offsets: Tensor | None) -> Groups:
    rows, columns = shape
    return groups(rows, count, first_dims, None if tensor_offsets is None else tensor_offsets // max(columns, 1))


def quantize_group(x: Tensor, call: CallArguments) -> tuple[Any, Groups]:
    """The matrix ``x`` as a grouped tensor whose members ``call`` describes, and its groups."""
    quantizer, count, first_dims, tensor_offsets = call.quantizer, call.num_tensors, call.first_dims, call.tensor_offsets
    if count < 1:
        raise ArgumentError(expected("at least one member", of="a grouped tensor", got=count, do="pass num_tensors"))
    if first_dims is None and x.shape[0] % count:
        raise ShapeError(expected(f"a multiple of {count} rows", of="a grouped tensor of equal members", got=x.shape[0], do="pass first_dims"))
    of = _groups(x.shape, count, first_dims, tensor_offsets)
    form, dtype = scheme_of(quantizer).format, to_torch(x.dtype)
    if tensor_offsets is None and first_dims is not None:
        tensor_offsets = lazy.cast(of.bounds * x.shape[1], lazy.int64)
    described = {"shape": x.shape, "dtype": dtype, "num_tensors": count, "first_dims": first_dims, "tensor_offsets": tensor_offsets}
    fields: dict[str, Any] = {"rowwise_data": lazy.reshape(x, (-1,))}
    if form.per_tensor:
        fields = _float8(x, quantizer, of)
    elif form is not PLAIN:
        fields = _blocks(x, quantizer, of)
    return build_grouped(quantizer, quantizer=quantizer, **described, **group_arguments(fields, quantizer)), of


def _float8(x: Tensor, quantizer: Any, of: Groups) -> dict[str, Any]:
    fp8, rows = fp8_format(quantizer.dtype), lazy.cast(x, lazy.float32)
    rows_of_nothing = lazy.zeros((x.shape[0],), lazy.uint32)
    amax = lazy.bitcast(of.largest(lazy.max(magnitude(x), 1) if x.shape[1] else rows_of_nothing), lazy.float32)
    if scheme_of(quantizer).delayed:
        scale = lazy.reshape(quantizer.scale, (-1,))
        if scale.size not in (1, of.count):
            do = "give one for each member"
            raise ShapeError(expected(f"1 or {of.count} scales", of="a delayed quantizer of grouped tensors", got=scale.size, do=do))
        if scale.size == 1:
            amax = lazy.reshape(lazy.max(amax), (1,))
        quantizer.amax = amax if quantizer.amax is None else lazy.maximum(quantizer.amax, lazy.reshape(amax, quantizer.amax.shape))
        scale = lazy.broadcast_to(scale, (of.count,))
    elif quantizer.with_amax_reduction:
        do = "reduce amaxes outside of the program"
        raise NotServedError(expected("no amax reduction", of="quantizing a lazy tensor", got="with_amax_reduction", do=do))
    else:
        scale = scale_from_amax(amax, fp8, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    data = encode(rows * of.spread(scale)[:, None], fp8)
    data = lazy.where(of.inside[:, None], data, lazy.zeros((1, 1), lazy.uint8))
    (rowwise, columnwise), inverse = usages(quantizer), reciprocal(scale)
    fields = {"amax": amax, "scale": scale} if scheme_of(quantizer) is CURRENT else {}
    fields |= {"rowwise_data": lazy.reshape(data, (-1,)), "scale_inv": inverse} if rowwise else {}
    turned = {"columnwise_data": lazy.reshape(transpose_bytes(data), (-1,)), "columnwise_scale_inv": inverse} if columnwise else {}
    return fields | turned


def _blocks(x: Tensor, quantizer: QuantizerLike, of: Groups) -> dict[str, Any]:
    tiles = of.tiles(block_format_of(quantizer).length)
    matrix = lazy.reshape(tiles.put(x), (tiles.rows, x.shape[1]))
    plain = copy(quantizer)
    plain.internal, plain.optimize_for_gemm = True, False
    known: dict[str, Any] = {}
    per_group: dict[str, Tensor] = {}
    if "amax" in member_fields(quantizer):
        per_group = _amaxes(matrix, quantizer, of, tiles)
        amaxes = known["amaxes"] = {way: lazy.reshape(_per_row(amax, tiles), (-1, 1)) for way, amax in per_group.items()}
        if "columnwise" in amaxes:  # whose lines are columns: a number for each block along them
            amaxes["columnwise"] = lazy.reshape(lazy.gather(per_group["columnwise"], 0, tiles.group), (1, -1))
    if getattr(quantizer, "stochastic_rounding", False):
        known["random"] = _random(matrix, quantizer, of, tiles)
    whole = BLOCKS.quantize(matrix, plain, x.dtype, **known)
    fields = {}
    for field, attribute in member_fields(quantizer).items():
        buffer = per_group.get("columnwise" if "columnwise" in field else "rowwise") if "amax" in field else getattr(whole, attribute)
        if buffer is not None:
            fields[field] = lazy.reshape(buffer, (-1,))
    return fields


def _random(matrix: Tensor, quantizer: QuantizerLike, of: Groups, tiles: Tiles) -> Random:
    """Numbers of which each member draws those that it would draw by itself: for each of its copies under a seed of its own."""
    ways = [way for way, asked in zip(("rowwise", "columnwise"), usages(quantizer), strict=True) if asked]
    seeds: dict[str, list[Tensor]] = {way: [] for way in ways}
    for _ in range(of.count):
        for way in ways:
            seeds[way].append(next_seed(matrix, "stochastic rounding"))

    def numbers(way: str, lines: Tensor) -> Tensor:
        seed = _per_row(lazy.concatenate(seeds[way], 0), tiles)
        row = lazy.cast(lazy.reshape(tiles.position, (-1,)), lazy.uint64)
        if way == "rowwise":
            fours = lines.shape[1] // 4
            return uniform(seed[:, None], row[:, None] * fours + lazy.iota((1, fours), 1, lazy.uint64))
        size = lazy.cast(_per_row(of.sizes, tiles), lazy.uint64)
        first = lazy.iota((lines.shape[0], 1), 0, lazy.uint64) * size[None, ::4] + row[None, ::4]
        return uniform(seed[None, ::4], lazy.shift_right_logical(first, 2))

    return numbers


def _per_row(numbers: Tensor, tiles: Tiles) -> Tensor:
    """``[groups] -> [rows of the tiles]``."""
    own = lazy.gather(numbers, 0, tiles.group)
    return lazy.reshape(lazy.broadcast_to(own[:, None], (tiles.count, tiles.size)), (-1,))


def _amaxes(matrix: Tensor, quantizer: Any, of: Groups, tiles: Tiles) -> dict[str, Tensor]:
    """Of each copy the amax of each group, fp32 ``[groups]``."""
    if quantizer.with_amax_reduction or quantizer.row_scaled_nvfp4:
        got = "with_amax_reduction" if quantizer.with_amax_reduction else "row_scaled_nvfp4"
        do = "let each member have an amax of its own"
        raise NotServedError(expected("an amax for each member", of="quantizing a grouped lazy tensor", got=got, do=do))
    sources = {"rowwise": lambda: matrix, "columnwise": lambda: lazy.transpose(column_source(matrix, quantizer), 0, 1)}
    asked = [way for way, wanted in zip(sources, usages(quantizer), strict=True) if wanted]
    found = {}
    for way in asked:
        blocks = lazy.reshape(magnitude(sources[way]()), (tiles.count, -1))
        mine = lazy.iota((of.count, 1), 0, lazy.int32) == tiles.group[None, :]
        largest = lazy.where(mine, lazy.max(blocks, 1)[None, :], lazy.zeros((1, 1), lazy.uint32))
        found[way] = lazy.bitcast(lazy.max(largest, 1), lazy.float32)
    return found


def group_values(x: Any, way: str, of: Groups) -> Tensor:
    """The values of a copy of the grouped tensor ``x``, fp32 ``[rows, columns]``. Rows that belong to no group have no meaningful values.

    Per-tensor FP8 and unquantized data are read from whichever copy there is. Raises ``ArgumentError`` where ``x`` lacks the copy ``way``.
    """
    rows, columns = x.logical_shape
    form = scheme_of(x.quantizer).format
    if form is PLAIN:
        return lazy.cast(lazy.reshape(x.rowwise_data, (rows, columns)), lazy.float32)
    if form.per_tensor:
        stored = x.rowwise_data is not None
        data = lazy.reshape(x.rowwise_data, (rows, columns)) if stored else lazy.transpose(lazy.reshape(x.columnwise_data, (columns, rows)), 0, 1)
        scale_inv = x.scale_inv if stored else x.columnwise_scale_inv
        return decode(data, x.quantizer.dtype) * of.spread(scale_inv)[:, None]
    if getattr(x, f"{way}_data") is None:
        do = "quantize it with that usage"
        raise ArgumentError(expected(f"a {way} copy", of="a grouped tensor in a product", got="none", do=do))
    assert isinstance(form, BlockFormat)
    tiles = of.tiles(form.length)
    values, factor = BLOCKS.reader.values(_member(x, way, (tiles.rows, columns), tiles), way)
    if factor is not None:
        values = values * lazy.reshape(factor, (-1, 1))
    return tiles.take(values)


def _member(x: Any, way: str, shape: tuple[int, int], tiles: Tiles) -> Any:
    """The copy of ``x`` as that of one tensor of ``shape``; amaxes are one per row."""
    plain = copy(x.quantizer)
    plain.internal, plain.optimize_for_gemm = True, False
    plain.rowwise_usage, plain.columnwise_usage = way == "rowwise", way == "columnwise"
    form = block_format_of(plain)
    specs = form.buffer_specs(plain, shape, *usages(plain))
    attributes = {attribute: field for field, attribute in member_fields(x.quantizer).items()}
    fields = dict.fromkeys(form.buffers)
    for name, (size, _) in specs.items():
        buffer = getattr(x, attributes[f"_{name}"])
        fields[name] = _per_row(buffer, tiles) if name.startswith("amax") else lazy.reshape(buffer, size)
    return build_quantized(plain, shape=shape, dtype=x.fake_dtype, **fields, **form.options(plain))
