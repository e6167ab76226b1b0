"""Block-scaled lazy tensors of every format: quantizing into new or given buffers, and reading the copies back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.block_fp8 import Copy, block_fp8_copies, block_fp8_values, mxfp8_copies, mxfp8_values
from fusible.tex.backends.xla.blocks import padded
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.backends.xla.fp8 import unless
from fusible.tex.backends.xla.nvfp4 import Random, nvfp4_amaxes, nvfp4_copies, nvfp4_values, transform_of
from fusible.tex.backends.xla.random import next_seed
from fusible.tex.factories import build_quantized
from fusible.tex.formats import logical_shape, scaling, usages
from fusible.tex.formats.block_layout import buffer_specs, check_block_output, check_block_quantizer, check_block_shape, storage_options
from fusible.tex.formats.block_reading import WAYS, BlockReader, by_columns
from fusible.tex.protocol import outer, to_torch

__all__ = ["block_dense", "block_values", "mixed_transform", "quantize_blocks"]

_BUFFERS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
_AMAXES = ("amax_rowwise", "amax_columnwise")


def quantize_blocks(
    x: Tensor,
    quantizer: Any,
    dtype: lazy.dtype,
    output: Any = None,
    noop: Tensor | None = None,
    amaxes: dict[str, Tensor] | None = None,
    random: Random | None = None,
) -> Any:
    """``x`` quantized in blocks; into ``output``, where given, unless ``noop[0] == 1``. ``amaxes`` and ``random``, where given, are those of an NVFP4
    tensor.

    Written are the copies that the quantizer asks for and those that ``output`` has. Raises before anything is written.
    """
    check_block_quantizer(quantizer)
    check_block_shape(quantizer, x.shape)
    rowwise, columnwise = usages(quantizer)
    if output is not None:
        check_block_output(output, quantizer, x, to_lazy)
        rowwise, columnwise = rowwise or output._rowwise_data is not None, columnwise or output._columnwise_data is not None
    options = storage_options(quantizer)
    if noop is not None and "with_gemm_swizzled_scales" in options:
        options["with_gemm_swizzled_scales"] = output._with_gemm_swizzled_scales if output is not None else False
    buffers = _encoded(x, quantizer, rowwise, columnwise, options.get("with_gemm_swizzled_scales", False), amaxes, random)
    if output is not None:
        return _fill(output, buffers, options, noop)
    names = _BUFFERS + _AMAXES if scaling(quantizer) == "nvfp4" else _BUFFERS
    return build_quantized(quantizer, shape=x.shape, dtype=to_torch(dtype), **{name: buffers.get(name) for name in names}, **options)


def _encoded(
    x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool, swizzled: bool, amaxes: dict[str, Tensor] | None, random: Random | None
) -> dict[str, Tensor]:
    """The buffers of ``x``, by name."""
    name, specs = scaling(quantizer), buffer_specs(quantizer, x.shape, rowwise, columnwise)
    if not x.size:
        if getattr(quantizer, "stochastic_rounding", False):
            for _ in range(rowwise + columnwise):
                next_seed(x, "stochastic rounding")
        return {buffer: lazy.zeros(size, to_lazy(stored)) for buffer, (size, stored) in specs.items()}
    matrix = lazy.reshape(x, (outer(x.shape), x.shape[-1]))
    copies: Iterable[Copy]
    buffers: dict[str, Tensor] = {}
    if name == "nvfp4":
        amaxes = nvfp4_amaxes(matrix, quantizer, rowwise, columnwise) if amaxes is None else amaxes
        buffers = {f"amax_{way}": lazy.reshape(amax, (-1,)) for way, amax in amaxes.items()}
        copies = nvfp4_copies(matrix, quantizer, amaxes, random)
    else:
        copies = (block_fp8_copies if name == "block" else mxfp8_copies)(matrix, quantizer, rowwise, columnwise)
    for way, data, scales in copies:
        scales = padded(scales, specs[f"{way}_scale_inv"][0])
        buffers[f"{way}_data"] = lazy.reshape(data, specs[f"{way}_data"][0])
        buffers[f"{way}_scale_inv"] = _swizzled(scales, by_columns(name, way)) if swizzled else scales
    return buffers


def _fill(output: Any, buffers: dict[str, Tensor], options: dict[str, Any], noop: Tensor | None) -> Any:
    for name, new in buffers.items():
        held = getattr(output, f"_{name}")
        if held is None:
            setattr(output, f"_{name}", new)
        else:
            new = lazy.reshape(new, held.shape)
            held.assign_(new if noop is None else unless(noop, held, new))
    for name, value in options.items():
        setattr(output, f"_{name}", value)
    return output


def _swizzled(scales: Tensor, columnwise: bool) -> Tensor:
    """``[R, C]`` (``[C, R]`` where ``columnwise``) in the order ``[R / 128, C / 4, 32, 4, 4]``: row within 32, group of 32 rows, block."""
    lines = lazy.transpose(scales, 0, 1) if columnwise else scales
    rows, blocks = lines.shape
    tiles = lazy.reshape(lines, (rows // 128, 4, 32, blocks // 4, 4))
    return lazy.reshape(lazy.permute(tiles, (0, 3, 2, 1, 4)), scales.shape)


def _unswizzled(scales: Tensor, columnwise: bool) -> Tensor:
    """The inverse of ``_swizzled``."""
    rows, blocks = scales.shape[::-1] if columnwise else scales.shape
    tiles = lazy.reshape(scales, (rows // 128, blocks // 4, 32, 4, 4))
    lines = lazy.reshape(lazy.permute(tiles, (0, 3, 2, 1, 4)), (rows, blocks))
    return lazy.transpose(lines, 0, 1) if columnwise else lines


_READER = BlockReader(lambda shape, data: lazy.zeros(shape), _unswizzled, block_fp8_values, mxfp8_values, nvfp4_values, transform_of)
block_values = _READER.values
mixed_transform = _READER.mixed_transform


def block_dense(x: Any) -> Tensor:
    """The value of ``x`` in fp32, from its row-wise copy where it has one, else from the column-wise one."""
    way = WAYS[x._rowwise_data is None]
    values, factor = block_values(x, way)
    if factor is not None:
        values = values * lazy.reshape(factor, (-1, 1) if way == "rowwise" else (1, -1))
    return lazy.reshape(values, logical_shape(x))
