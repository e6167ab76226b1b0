"""Quantizing the members of one buffer, each by itself, into the buffers of a grouped tensor: what is alike in backends of torch's tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.calls.grouped import GroupLayout, build_grouped, group_arguments, is_grouped, layout_of, member_fields
from fusible.tex.calls.inference_tensors import writing
from fusible.tex.formats import scheme_of
from fusible.tex.interface.declare import CallArguments
from fusible.tex.protocol import QuantizerLike, accumulator

__all__ = ["grouped_tensor", "joined", "like", "offsets_of", "placed", "with_sums"]

Pieces = Sequence[Tensor]


def grouped_tensor(
    x: Tensor,
    quantizer: Any,
    call: CallArguments,
    quantize: Callable[[Pieces], tuple[list[Any], dict[str, Tensor]]],
    noop: Tensor | None = None,
    output: Any = None,
) -> Any:
    """The matrix ``x`` as a grouped tensor, of the ``num_tensors``, ``first_dims``, ``last_dims`` and ``tensor_offsets`` of ``call``.

    ``quantize(pieces)`` gives the quantized members, and buffers that they have together; it is called where there is a ``quantizer``.
    """
    count, first_dims, last_dims, tensor_offsets = call.num_tensors, call.first_dims, call.last_dims, call.tensor_offsets
    layout = layout_of(x.shape, count, first_dims, last_dims, tensor_offsets)
    if output is not None:
        _check_output(output, layout, quantizer)
    found: list[Any] = []
    fields = {"rowwise_data": x.reshape(-1)}
    if quantizer is not None:
        found, shared = quantize(layout.pieces(x.reshape(-1)))
        fields = joined(found, member_fields(quantizer), layout) | shared
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


def like(quantizer: QuantizerLike, output: Any, noop: Tensor | None) -> Any:
    """``quantizer``, or where what ``output`` holds may stay, one that orders scales as it does. Delayed scaling has one scale, and state to keep."""
    if output is None or noop is None or scheme_of(quantizer).delayed:
        return quantizer
    found = copy(quantizer)
    found.optimize_for_gemm = bool(output._with_gemm_swizzled_scales)
    return found


def with_sums(x: Tensor, call: CallArguments, grouped: Callable[[], Any]) -> list[Any]:
    """``[grouped(), sums]`` of a call of ``bgrad_group_quantize``: each member's sum over its rows."""
    if call.last_dims is not None:
        raise ArgumentError(expected("no last_dims", of="bgrad_group_quantize", got="some", do="pass members of equal width"))
    layout = layout_of(x.shape, call.num_tensors, call.first_dims, None, call.tensor_offsets)
    sums = [piece.sum(0, dtype=accumulator(x.dtype)) for piece in layout.pieces(x.reshape(-1))]
    return [grouped(), torch.stack(sums).to(x.dtype)]


def offsets_of(layout: GroupLayout, first_dims: Any, last_dims: Any, tensor_offsets: Any, device: Any) -> Any:
    """Where the members begin and the last one ends, in elements: as given, or int64 ``[num_tensors + 1]`` where their sizes differ.

    None stands for equal members, whose offsets follow from their size.
    """
    if tensor_offsets is not None or (first_dims is None and last_dims is None):
        return tensor_offsets
    return torch.tensor([*layout.offsets, layout.offsets[-1] + math.prod(layout.shapes[-1])], dtype=torch.int64, device=device)


def joined(found: list[Any], names: Mapping[str, str], layout: GroupLayout) -> dict[str, Tensor]:
    """The buffers of a grouped tensor from those of its members; data at its offset, everything else in a row."""
    fields = {}
    for field, attribute in names.items():
        parts = [getattr(member, attribute) for member in found]
        copy_field = "columnwise_data" if field.startswith("columnwise") else "rowwise_data"
        if any(part is None for part in parts) or any(getattr(member, names[copy_field]) is None for member in found):
            continue
        fields[field] = placed(parts, layout) if field.endswith("data") else torch.cat([part.reshape(-1) for part in parts])
    return fields


def placed(parts: list[Tensor], layout: GroupLayout) -> Tensor:
    """One buffer of the members' parts, each where the member lies, 0 elsewhere."""
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
