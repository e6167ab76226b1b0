"""Quantizing the members of one buffer, each by itself, into the buffers of a grouped tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from fusible.errors import DTypeError, ShapeError, expected
from fusible.tex.backends.torch_backend.fp8 import reduced, scale_from_amax, tensor_amax, transpose_bytes
from fusible.tex.backends.torch_backend.quantizing import quantize_tensor
from fusible.tex.calls.group_quantize import grouped_tensor, joined, like, placed
from fusible.tex.calls.grouped import GroupLayout, member_fields
from fusible.tex.formats import CURRENT, scheme_of
from fusible.tex.interface.declare import CallArguments
from fusible.tex.protocol import QuantizerLike, fp8_format

__all__ = ["columnwise_fields", "quantize_group", "quantize_group_columnwise", "transposed_fields"]

_Quantize = Callable[[Tensor, int], Any]


def quantize_group(
    x: Tensor, quantizer: Any, call: CallArguments, noop: Tensor | None = None, output: Any = None, quantize: _Quantize | None = None
) -> Any:
    """The matrix ``x`` as a grouped tensor; ``quantize(piece, i)``, where given, quantizes a member."""

    def each(pieces: Sequence[Tensor]) -> tuple[list[Any], dict[str, Tensor]]:
        scales = _current_scales(pieces, quantizer) if quantize is None and scheme_of(quantizer) is CURRENT else {}
        one = quantize or _each_by(like(quantizer, output, noop), call.num_tensors, noop, scales.get("amax"))
        return [one(piece, i) for i, piece in enumerate(pieces)], scales

    return grouped_tensor(x, quantizer, call, each, noop, output)


def _current_scales(pieces: Sequence[Tensor], quantizer: Any) -> dict[str, Tensor]:
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
    return joined(found, member_fields(quantizer), layout)


def transposed_fields(x: Any, layout: GroupLayout) -> dict[str, Tensor]:
    """The column-wise copy of members that have one scale each: the same bytes, transposed."""
    parts = [transpose_bytes(piece) for piece in layout.pieces(x.rowwise_data)]
    return {"columnwise_data": placed(parts, layout), "columnwise_scale_inv": x.scale_inv}
