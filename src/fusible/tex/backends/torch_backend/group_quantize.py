"""Quantizing the members of one buffer, each by itself, into the buffers of a grouped tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from fusible.errors import DTypeError, ShapeError, expected
from fusible.tex.backends.torch_backend.fp8 import reduced, scale_from_amax, tensor_amax, transpose_bytes
from fusible.tex.backends.torch_backend.quantizing import quantize_tensor
from fusible.tex.calls.grouped import GroupLayout, build_grouped, group_arguments, is_grouped, layout_of, member_fields
from fusible.tex.calls.inference_tensors import writing
from fusible.tex.formats import CURRENT, scheme_of, usages
from fusible.tex.interface.declare import CallArguments
from fusible.tex.protocol import QuantizerLike, fp8_format

__all__ = ["columnwise_fields", "offsets_of", "quantize_group", "quantize_group_columnwise", "transposed_fields"]

_Quantize = Callable[[Tensor, int], Any]


def quantize_group(
    x: Tensor, quantizer: Any, call: CallArguments, noop: Tensor | None = None, output: Any = None, quantize: _Quantize | None = None
) -> Any:
    """The matrix ``x`` as a grouped tensor, of the ``num_tensors``, ``first_dims``, ``last_dims`` and ``tensor_offsets`` of ``call``."""
    count, first_dims, last_dims, tensor_offsets = call.num_tensors, call.first_dims, call.last_dims, call.tensor_offsets
    layout = layout_of(x.shape, count, first_dims, last_dims, tensor_offsets)
    if output is not None:
        _check_output(output, layout, quantizer)
    pieces = layout.pieces(x.reshape(-1))
    found, fields = [], {"rowwise_data": x.reshape(-1)}
    if quantizer is not None:
        names, _ = member_fields(quantizer), usages(quantizer)
        scales = _current_scales(pieces, quantizer) if quantize is None and scheme_of(quantizer) is CURRENT else {}
        one = quantize or _each_by(_like(quantizer, output, noop), count, noop, scales.get("amax"))
        found = [one(piece, i) for i, piece in enumerate(pieces)]
        fields = _joined(found, names, layout) | scales
    swizzled = any(getattr(member, "_with_gemm_swizzled_scales", False) for member in found)
    if output is not None:
        output._with_gemm_swizzled_scales = swizzled
        return _fill(output, fields, noop)
    return build_grouped(
        quantizer,
        shape=tuple(x.shape),
        dtype=x.dtype,
        num_tensors=count,
        quantizer=quantizer,
        first_dims=first_dims,
        last_dims=last_dims,
        tensor_offsets=offsets_of(layout, first_dims, last_dims, tensor_offsets, x.device),
        with_gemm_swizzled_scales=swizzled,
        **group_arguments(fields, quantizer),
    )


def offsets_of(layout: GroupLayout, first_dims: Any, last_dims: Any, tensor_offsets: Any, device: Any) -> Any:
    """Where the members begin and the last one ends, in elements: as given, or int64 ``[num_tensors + 1]`` where their sizes differ.

    None stands for equal members, whose offsets follow from their size.
    """
    if tensor_offsets is not None or (first_dims is None and last_dims is None):
        return tensor_offsets
    return torch.tensor([*layout.offsets, layout.offsets[-1] + math.prod(layout.shapes[-1])], dtype=torch.int64, device=device)


def _like(quantizer: QuantizerLike, output: Any, noop: Tensor | None) -> Any:
    """``quantizer``, or where what ``output`` holds may stay, one that orders scales as it does. Delayed scaling has one scale, and state to keep."""
    if output is None or noop is None or scheme_of(quantizer).delayed:
        return quantizer
    found = copy(quantizer)
    found.optimize_for_gemm = bool(output._with_gemm_swizzled_scales)
    return found


def _current_scales(pieces: list[Tensor], quantizer: Any) -> dict[str, Tensor]:
    """The amax and the scale of each member, fp32 ``[num_tensors]``; one reduction for all where the amaxes are reduced."""
    amax = reduced(torch.cat([tensor_amax(piece) for piece in pieces]), quantizer)
    return {"amax": amax, "scale": scale_from_amax(amax, fp8_format(quantizer.dtype), quantizer.force_pow_2_scales, quantizer.amax_epsilon)}


def _each_by(quantizer: Any, count: int, noop: Tensor | None, amaxes: Tensor | None) -> _Quantize:
    """How a member is quantized: all alike, under current scaling by its entry of ``amaxes``, or under delayed scaling each by its own of ``count``
    scales, into its own of as many amaxes."""
    if amaxes is not None:
        return lambda piece, i: quantize_tensor(piece, quantizer, piece.dtype, amax=amaxes[i : i + 1])
    if not scheme_of(quantizer).delayed:
        return lambda piece, i: quantize_tensor(piece, quantizer, piece.dtype)
    scales = quantizer.scale.numel()
    if scales == 1:
        return lambda piece, i: quantize_tensor(piece, quantizer, piece.dtype, None, noop)
    if scales != count:
        raise ShapeError(expected(f"1 or {count} scales", of="a delayed quantizer of grouped tensors", got=scales, do="give one for each member"))
    scale = quantizer.scale.view(-1)
    if quantizer.amax is None:
        quantizer.amax = torch.zeros_like(scale)
    amax = quantizer.amax.view(-1)

    def quantize(piece: Tensor, i: int) -> Any:
        own = copy(quantizer)
        own.scale, own.amax = scale[i : i + 1], amax[i : i + 1]
        return quantize_tensor(piece, own, piece.dtype, None, noop)

    return quantize


def _joined(found: list[Any], names: Mapping[str, str], layout: GroupLayout) -> dict[str, Tensor]:
    """The buffers of a grouped tensor from those of its members; data at its offset, everything else in a row."""
    fields = {}
    for field, attribute in names.items():
        parts = [getattr(member, attribute) for member in found]
        copy_field = "columnwise_data" if field.startswith("columnwise") else "rowwise_data"
        if any(part is None for part in parts) or any(getattr(member, names[copy_field]) is None for member in found):
            continue
        fields[field] = _placed(parts, layout) if field.endswith("data") else torch.cat([part.reshape(-1) for part in parts])
    return fields


def _placed(parts: list[Tensor], layout: GroupLayout) -> Tensor:
    elements = sum(math.prod(shape) for shape in layout.shapes)
    stored = sum(part.numel() for part in parts)
    if elements == layout.total and [*layout.offsets] == sorted(layout.offsets):
        return torch.cat([part.reshape(-1) for part in parts])
    # A byte may hold two elements.
    buffer = parts[0].new_zeros(layout.total * stored // elements if elements else layout.total)
    for part, offset, shape in zip(parts, layout.offsets, layout.shapes, strict=True):
        size = math.prod(shape)
        start = offset * part.numel() // size if size else 0
        buffer[start : start + part.numel()] = part.reshape(-1)
    return buffer


def _check_output(output: Any, layout: GroupLayout, quantizer: QuantizerLike | None) -> None:
    if not is_grouped(output):
        got = type(output).__qualname__
        raise DTypeError(expected("a grouped tensor", of="output of group_quantize", got=got, do="pass one that group_quantize made"))
    if output.num_tensors != len(layout.shapes) or tuple(output.logical_shape) != layout.logical_shape:
        got = f"{output.num_tensors} of {list(output.logical_shape)}"
        wanted = f"{len(layout.shapes)} members of {list(layout.logical_shape)}"
        raise ShapeError(expected(wanted, of="output of group_quantize", got=got, do="pass one of the same layout"))


def _fill(output: Any, fields: dict[str, Tensor], noop: Tensor | None) -> Any:
    skip = None if noop is None else noop == 1
    for field, buffer in fields.items():
        old = getattr(output, field)
        if old is None:
            setattr(output, field, buffer)
        else:
            with writing(old):
                old.view(-1).copy_(buffer if skip is None else torch.where(skip, old.view(-1), buffer))
    return output


def _columnwise_alone(quantizer: QuantizerLike) -> Any:
    """``quantizer`` making the column-wise copy alone, with the same state."""
    alone = copy(quantizer)
    alone.rowwise_usage, alone.columnwise_usage = False, True
    return alone


def quantize_group_columnwise(values: Tensor, call: CallArguments) -> Any:
    """``quantize_group`` of the column-wise copy alone, whatever usages the quantizer of ``call`` has."""
    quantizer = call.quantizer
    if quantizer is None:
        raise DTypeError(expected("a quantizer", of="a grouped activation", got="None", do="use the scaled activation without a group"))
    alone = _columnwise_alone(quantizer)
    grouped = quantize_group(values, alone, call)
    grouped.quantizer = quantizer
    if getattr(quantizer, "amax", alone) is None:
        quantizer.amax = alone.amax
    return grouped


def columnwise_fields(x: Any, values: Tensor, quantizer: QuantizerLike, layout: GroupLayout) -> dict[str, Tensor]:
    """The column-wise copy of ``values``. Its scales are swizzled if those of ``x`` are."""
    alone = _columnwise_alone(quantizer)
    alone.optimize_for_gemm = bool(x._with_gemm_swizzled_scales)
    found = [quantize_tensor(piece, alone, piece.dtype) for piece in layout.pieces(values.view(-1))]
    return _joined(found, member_fields(quantizer), layout)


def transposed_fields(x: Any, layout: GroupLayout) -> dict[str, Tensor]:
    """The column-wise copy of members that have one scale each: the same bytes, transposed."""
    parts = [transpose_bytes(piece) for piece in layout.pieces(x.rowwise_data)]
    return {"columnwise_data": _placed(parts, layout), "columnwise_scale_inv": x.scale_inv}
