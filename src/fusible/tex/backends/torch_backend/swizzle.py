"""The order of block scales that matrix products of NVIDIA read, on quantized tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.tex.backends.torch_backend.layout import addresses
from fusible.tex.calls.grouped import layout_of_grouped
from fusible.tex.calls.layout import check_equal_lengths
from fusible.tex.calls.scale_order import swizzle, without_padding
from fusible.tex.formats import MXFP8, NVFP4, BlockFormat, block_format_of, format_of
from fusible.tex.interface.swizzle import Swizzle

__all__ = ["SwizzleKernels"]

_FLAG = "_with_gemm_swizzled_scales"
_USAGES = ("rowwise", "columnwise")
_TILE = 128
"""Rows of scales that are ordered among themselves."""
_TYPES: dict[str, tuple[BlockFormat, bool]] = {"mxfp8_rowwise": (MXFP8, False), "mxfp8_columnwise": (MXFP8, True), "nvfp4": (NVFP4, False)}
"""Of a swizzle type, its format and whether its scales are those of columns. Either copy of NVFP4 lies as a row-wise one of its own data."""


class SwizzleKernels(Swizzle):
    def swizzle_scales_for_gemm_(self, tensor: Any) -> None:
        self.multi_tensor_swizzle_scales_for_gemm_([tensor], True, True)

    def multi_tensor_swizzle_scales_for_gemm_(self, tensors: Sequence[Any], rowwise_usage: bool, columnwise_usage: bool) -> None:
        plain = [tensor for tensor in tensors if getattr(tensor, _FLAG, None) is False]
        done = [_swizzled(tensor, (rowwise_usage, columnwise_usage), checked=True) for tensor in plain]
        for tensor, scales in zip(plain, done, strict=True):
            _put(tensor, scales)
            if scales:
                setattr(tensor, _FLAG, True)

    def multi_tensor_swizzle_scales_for_gemm_unchecked_(self, tensors: Sequence[Any], rowwise_usage: bool, columnwise_usage: bool) -> None:
        blocked = [tensor for tensor in tensors if hasattr(tensor, _FLAG)]
        done = [_swizzled(tensor, (rowwise_usage, columnwise_usage), checked=False) for tensor in blocked]
        for tensor, scales in zip(blocked, done, strict=True):
            _put(tensor, scales)

    def grouped_swizzle_for_gemm(self, tensor: Any, rowwise: bool, columnwise: bool) -> None:
        if getattr(tensor, _FLAG, None) is not False:
            return
        asked = {"scale_inv": (rowwise, False), "columnwise_scale_inv": (columnwise, True)}
        scales = {
            name: _swizzled_group(tensor, getattr(tensor, name), columns)
            for name, (wanted, columns) in asked.items()
            if wanted and getattr(tensor, name, None) is not None and getattr(tensor, name).element_size() == 1
        }
        _put(tensor, scales)
        if scales:
            setattr(tensor, _FLAG, True)

    def swizzle_scales_and_pack_ptrs_for_discrete_weights(
        self, data_tensors: Sequence[Any], scale_tensors: Sequence[Any], swizzle_type: str, device: Any
    ) -> tuple[Any, Any, Any]:
        function = "swizzle_scales_and_pack_ptrs_for_discrete_weights"
        if swizzle_type not in _TYPES:
            wanted = " or ".join(map(repr, _TYPES))
            raise ArgumentError(expected(wanted, of=f"swizzle_type of {function}", got=repr(swizzle_type), do="pass one of these"))
        check_equal_lengths(function, data_tensors, scale_tensors)
        (form, columns), of = _TYPES[swizzle_type], f"scale_tensors of {function}"
        pairs = zip(data_tensors, scale_tensors, strict=True)
        swizzled = [_ordered(data, scale.view(torch.uint8), form, columns, of=of).view(-1) for data, scale in pairs]
        buffer = torch.cat(swizzled) if swizzled else torch.empty(0, dtype=torch.uint8, device=device)
        scales = buffer.split([scale.numel() for scale in swizzled])
        return addresses(data_tensors, device), addresses(scales, device), buffer


def _put(tensor: Any, attributes: dict[str, Tensor]) -> None:
    for name, value in attributes.items():
        setattr(tensor, name, value)


def _swizzled(tensor: Any, asked: tuple[bool, bool], *, checked: bool) -> dict[str, Tensor]:
    """The swizzled scales by attribute; where ``checked``, their shape must follow from that of the data."""
    found = {}
    form = format_of(tensor)
    assert isinstance(form, BlockFormat)
    for usage, wanted in zip(_USAGES, asked, strict=True):
        name, columns = f"_{usage}_scale_inv", usage == "columnwise"
        scale = getattr(tensor, name, None)
        if not wanted or scale is None:
            continue
        data = getattr(tensor, f"_{usage}_data", None)
        if checked and data is not None:
            found[name] = _ordered(data, scale, form, columns, of=f"the {usage} scales of a tensor").view(scale.shape)
        else:
            found[name] = swizzle(scale.view(-1, scale.shape[-1]), columns and form.blocks_first).view(scale.shape)
    return found


def _ordered(data: Tensor, scale: Tensor, form: BlockFormat, columns: bool, *, of: str) -> Tensor:
    """The swizzled scales of ``data``, zeros where they are padded. Raises ``ShapeError`` unless they are as many as ``data`` has, padded."""
    logical = _logical(data, form, columns)
    shape = form.scale_shape(logical, columns, False)
    if math.prod(shape) != scale.numel():
        raise ShapeError(expected(f"{list(shape)}", of=of, got=list(scale.shape), do="pad them as their format says"))
    return swizzle(without_padding(scale.view(shape), *form.used_scales(logical, columns, False)), columns and form.blocks_first)


def _logical(data: Tensor, form: BlockFormat, columns: bool) -> tuple[int, int]:
    """The matrix that the bytes stand for: NVFP4 packs two elements to a byte, and holds column-wise data transposed, ``[last, *leading]``."""
    if columns and form.transposed:
        return form.packed * math.prod(data.shape[1:]), data.shape[0]
    return math.prod(data.shape[:-1]), form.packed * data.shape[-1]


def _swizzled_group(tensor: Any, scales: Tensor, columns: bool) -> Tensor:
    form = block_format_of(tensor.quantizer)
    flat = scales.reshape(-1)
    if not columns and tensor.last_dims is None and tensor.first_dims is not None and not flat.is_cpu:
        (_, width), (_, used) = (f((0, tensor.logical_shape[-1]), False, False) for f in (form.scale_shape, form.used_scales))
        if width and flat.numel() % (_TILE * width) == 0:
            return _swizzled_there(flat.view(-1, width), used, tensor.first_dims).view(scales.shape)
    matrices = layout_of_grouped(tensor).shapes
    shapes = [form.scale_shape(shape, columns, False) for shape in matrices]
    sizes = [math.prod(shape) for shape in shapes]
    if sum(sizes) > flat.numel():
        got = flat.numel()
        raise ShapeError(expected(f"{sum(sizes)} scales", of="a grouped tensor of these members", got=got, do="allocate them as its format says"))
    parts = flat.split([*sizes, flat.numel() - sum(sizes)])
    used = [form.used_scales(shape, columns, False) for shape in matrices]
    whole = [without_padding(part.view(shape), *each) for part, shape, each in zip(parts, shapes, used, strict=False)]
    return torch.cat([*(swizzle(each, columns and form.blocks_first).view(-1) for each in whole), parts[-1]]).view(scales.shape)


def _swizzled_there(scales: Tensor, used: int, rows: Tensor) -> Tensor:
    """The row-wise scales of members of so many ``rows`` each, without reading these from a device: the rows of a member are padded to whole tiles,
    and tiles of rows are outermost, so that members need not be told apart but for their padding."""
    ends = rows.add(_TILE - 1).div(_TILE, rounding_mode="floor").mul(_TILE).cumsum(0)
    index = torch.arange(len(scales), device=scales.device)
    member = torch.searchsorted(ends, index, right=True).clamp(max=len(rows) - 1)
    starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    clear = (index - starts[member] < rows[member])[:, None] & (torch.arange(scales.shape[1], device=scales.device) < used)
    ordered = swizzle(torch.where(clear, scales, 0)).view(scales.shape)
    return torch.where((index < ends[-1])[:, None], ordered, scales)  # what lies beyond the last member is nobody's
