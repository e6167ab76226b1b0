"""Block-scaled tensors of every format: quantizing into new or given buffers, and reading the copies back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.block_fp8 import Copy, block_fp8_copies, block_fp8_values, mxfp8_copies, mxfp8_values
from fusible.tex.backends.torch_backend.blocks import padded
from fusible.tex.backends.torch_backend.nvfp4 import nvfp4_amaxes, nvfp4_copies, nvfp4_values, transform_of
from fusible.tex.backends.torch_backend.scale_order import swizzle, unswizzle
from fusible.tex.calls.inference_tensors import writing
from fusible.tex.calls.seeds import draw_seeds
from fusible.tex.factories import build_quantized
from fusible.tex.formats import logical_shape, scaling, usages
from fusible.tex.formats.block_layout import buffer_specs, check_block_output, check_block_quantizer, check_block_shape, storage_options
from fusible.tex.formats.block_reading import WAYS, BlockReader, by_columns
from fusible.tex.protocol import outer

__all__ = ["block_dense", "block_values", "empty_blocks", "mixed_transform", "quantize_blocks"]

_BUFFERS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
_AMAXES = ("amax_rowwise", "amax_columnwise")


def quantize_blocks(
    x: Tensor, quantizer: Any, dtype: torch.dtype, output: Any = None, noop: Tensor | None = None, amaxes: dict[str, Tensor] | None = None
) -> Any:
    """``x`` quantized in blocks; into ``output``, where given, unless ``noop[0] == 1``. ``amaxes``, where given, are those of an NVFP4 tensor.

    Written are the copies that the quantizer asks for and those that ``output`` has. Raises before anything is written.
    """
    check_block_quantizer(quantizer)
    check_block_shape(quantizer, x.shape)
    rowwise, columnwise = usages(quantizer)
    if output is not None:
        check_block_output(output, quantizer, x)
        rowwise, columnwise = rowwise or output._rowwise_data is not None, columnwise or output._columnwise_data is not None
    options = storage_options(quantizer)
    if noop is not None and "with_gemm_swizzled_scales" in options:
        options["with_gemm_swizzled_scales"] = output._with_gemm_swizzled_scales if output is not None else False
    buffers = _encoded(x, quantizer, rowwise, columnwise, options.get("with_gemm_swizzled_scales", False), amaxes)
    if output is None:
        return _build(quantizer, x.shape, dtype, buffers, options)
    return _fill(output, buffers, options, noop)


def empty_blocks(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pin_memory: bool) -> Any:
    """A tensor of unspecified values with the copies that ``quantizer`` asks for."""
    check_block_quantizer(quantizer)
    check_block_shape(quantizer, shape)
    specs = buffer_specs(quantizer, shape, *usages(quantizer))
    buffers = {name: torch.empty(size, dtype=stored, device=device, pin_memory=pin_memory) for name, (size, stored) in specs.items()}
    return _build(quantizer, shape, dtype, buffers, storage_options(quantizer))


def _build(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, buffers: dict[str, Tensor], options: dict[str, Any]) -> Any:
    names = _BUFFERS + _AMAXES if scaling(quantizer) == "nvfp4" else _BUFFERS
    return build_quantized(quantizer, shape=tuple(shape), dtype=dtype, **{name: buffers.get(name) for name in names}, **options)


def _encoded(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool, swizzled: bool, amaxes: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """The buffers of ``x``, by name."""
    name, specs = scaling(quantizer), buffer_specs(quantizer, x.shape, rowwise, columnwise)
    if not x.numel():
        if getattr(quantizer, "stochastic_rounding", False):
            draw_seeds(rowwise + columnwise, x.device)  # as of any tensor: who records a program does not know which members are empty
        return {buffer: torch.zeros(size, dtype=stored, device=x.device) for buffer, (size, stored) in specs.items()}
    matrix = x.reshape(outer(x.shape), x.shape[-1])
    copies: Iterable[Copy]
    buffers: dict[str, Tensor] = {}
    if name == "nvfp4":
        amaxes = nvfp4_amaxes(matrix, quantizer, rowwise, columnwise) if amaxes is None else amaxes
        buffers = {f"amax_{way}": amax for way, amax in amaxes.items()}
        copies = nvfp4_copies(matrix, quantizer, amaxes)
    else:
        copies = (block_fp8_copies if name == "block" else mxfp8_copies)(matrix, quantizer, rowwise, columnwise)
    for way, data, scales in copies:
        shape, scales_shape = specs[f"{way}_data"][0], specs[f"{way}_scale_inv"][0]
        scales = padded(scales, scales_shape)
        buffers[f"{way}_data"] = data.contiguous().view(shape)
        buffers[f"{way}_scale_inv"] = swizzle(scales, by_columns(name, way)) if swizzled else scales
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


_READER = BlockReader(_zeros, unswizzle, block_fp8_values, mxfp8_values, nvfp4_values, transform_of)
block_values = _READER.values
mixed_transform = _READER.mixed_transform


def block_dense(x: Any) -> Tensor:
    """The value of ``x`` in fp32, from its row-wise copy where it has one, else from the column-wise one."""
    way = WAYS[x._rowwise_data is None]
    values, factor = block_values(x, way)
    if factor is not None:
        values = values.mul_(factor.view(-1, 1) if way == "rowwise" else factor.view(1, -1))
    return values.reshape(logical_shape(x))
