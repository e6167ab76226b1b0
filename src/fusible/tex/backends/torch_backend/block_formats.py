"""Block-scaled tensors of every format: quantizing into new or given buffers, and reading the copies back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.block_fp8 import FLOAT8_BLOCKS_CODEC, MXFP8_CODEC
from fusible.tex.backends.torch_backend.blocks import padded
from fusible.tex.backends.torch_backend.nvfp4 import NVFP4_CODEC
from fusible.tex.backends.torch_backend.scale_order import swizzle, unswizzle
from fusible.tex.calls.inference_tensors import writing
from fusible.tex.calls.seeds import draw_seeds
from fusible.tex.factories import build_quantized
from fusible.tex.formats import FLOAT8_BLOCKS, MXFP8, NVFP4, WAYS, block_format_of, check_block_output, checked_format, logical_shape, usages
from fusible.tex.formats.block_reading import BlockReader
from fusible.tex.protocol import outer

__all__ = ["block_dense", "block_values", "empty_blocks", "mixed_transform", "quantize_blocks"]

for _form, _codec in ((FLOAT8_BLOCKS, FLOAT8_BLOCKS_CODEC), (MXFP8, MXFP8_CODEC), (NVFP4, NVFP4_CODEC)):
    _form.codecs["torch"] = _codec


def quantize_blocks(x: Tensor, quantizer: Any, dtype: torch.dtype, output: Any = None, noop: Tensor | None = None, **given: Any) -> Any:
    """``x`` quantized in blocks; into ``output``, where given, unless ``noop[0] == 1``. ``given``: what is known of it to the format's codec.

    Written are the copies that the quantizer asks for and those that ``output`` has. Raises before anything is written.
    """
    form = checked_format(quantizer, x.shape)
    rowwise, columnwise = usages(quantizer)
    if output is not None:
        check_block_output(output, quantizer, x)
        rowwise, columnwise = rowwise or output._rowwise_data is not None, columnwise or output._columnwise_data is not None
    options = form.options(quantizer)
    if noop is not None and "with_gemm_swizzled_scales" in options:
        options["with_gemm_swizzled_scales"] = output._with_gemm_swizzled_scales if output is not None else False
    buffers = _encoded(x, quantizer, rowwise, columnwise, options.get("with_gemm_swizzled_scales", False), given)
    if output is None:
        return _build(quantizer, x.shape, dtype, buffers, options)
    return _fill(output, buffers, options, noop)


def empty_blocks(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pin_memory: bool) -> Any:
    """A tensor of unspecified values with the copies that ``quantizer`` asks for."""
    form = checked_format(quantizer, shape)
    specs = form.buffer_specs(quantizer, shape, *usages(quantizer))
    buffers = {name: torch.empty(size, dtype=stored, device=device, pin_memory=pin_memory) for name, (size, stored) in specs.items()}
    return _build(quantizer, shape, dtype, buffers, form.options(quantizer))


def _build(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, buffers: dict[str, Tensor], options: dict[str, Any]) -> Any:
    names = block_format_of(quantizer).buffers
    return build_quantized(quantizer, shape=tuple(shape), dtype=dtype, **{name: buffers.get(name) for name in names}, **options)


def _encoded(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool, swizzled: bool, given: dict[str, Any]) -> dict[str, Tensor]:
    """The buffers of ``x``, by name."""
    form = block_format_of(quantizer)
    specs = form.buffer_specs(quantizer, x.shape, rowwise, columnwise)
    if not x.numel():
        if getattr(quantizer, "stochastic_rounding", False):
            draw_seeds(rowwise + columnwise, x.device)  # as of any tensor: who records a program does not know which members are empty
        return {buffer: torch.zeros(size, dtype=stored, device=x.device) for buffer, (size, stored) in specs.items()}
    matrix = x.reshape(outer(x.shape), x.shape[-1])
    buffers, copies = _READER.codec(form).encode(matrix, quantizer, rowwise, columnwise, **given)
    for way, data, scales in copies:
        shape, scales_shape = specs[f"{way}_data"][0], specs[f"{way}_scale_inv"][0]
        scales = padded(scales, scales_shape)
        buffers[f"{way}_data"] = data.contiguous().view(shape)
        buffers[f"{way}_scale_inv"] = swizzle(scales, way == "columnwise" and form.blocks_first) if swizzled else scales
    return buffers


def _fill(output: Any, buffers: dict[str, Tensor], options: dict[str, Any], noop: Tensor | None) -> Any:
    skip = None if noop is None else noop == 1
    for name, new in buffers.items():
        held = getattr(output, f"_{name}")
        if held is None:
            setattr(output, f"_{name}", new)
        else:
            new = new.view(held.shape)
            with writing(held):
                held.copy_(new if skip is None else torch.where(skip, held, new))
    for name, value in options.items():
        setattr(output, f"_{name}", value)
    return output


def _zeros(shape: tuple[int, int], data: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=data.device)


_READER = BlockReader("torch", _zeros, unswizzle)
block_values = _READER.values
mixed_transform = _READER.mixed_transform


def block_dense(x: Any) -> Tensor:
    """The value of ``x`` in fp32, from its row-wise copy where it has one, else from the column-wise one."""
    way = WAYS[x._rowwise_data is None]
    values, factor = block_values(x, way)
    if factor is not None:
        values = values.mul_(factor.view(-1, 1) if way == "rowwise" else factor.view(1, -1))
    return values.reshape(logical_shape(x))
