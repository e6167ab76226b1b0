"""Block-scaled lazy tensors of every format: quantizing into new or given buffers, and reading the copies back."""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.block_fp8 import FLOAT8_BLOCKS_CODEC, MXFP8_CODEC
from fusible.tex.backends.xla.blocks import padded
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.backends.xla.fp8 import unless
from fusible.tex.backends.xla.nvfp4 import NVFP4_CODEC
from fusible.tex.backends.xla.random import next_seed
from fusible.tex.factories import build_quantized
from fusible.tex.formats import FLOAT8_BLOCKS, MXFP8, NVFP4, WAYS, block_format_of, check_block_output, checked_format, logical_shape, usages
from fusible.tex.formats.block_reading import BlockReader
from fusible.tex.protocol import outer, to_torch

__all__ = ["block_dense", "block_values", "mixed_transform", "quantize_blocks"]

for _form, _codec in ((FLOAT8_BLOCKS, FLOAT8_BLOCKS_CODEC), (MXFP8, MXFP8_CODEC), (NVFP4, NVFP4_CODEC)):
    _form.codecs["lazy"] = _codec


def quantize_blocks(x: Tensor, quantizer: Any, dtype: lazy.dtype, output: Any = None, noop: Tensor | None = None, **given: Any) -> Any:
    """``x`` quantized in blocks; into ``output``, where given, unless ``noop[0] == 1``. ``given``: what is known of it to the format's codec.

    Written are the copies that the quantizer asks for and those that ``output`` has. Raises before anything is written.
    """
    form = checked_format(quantizer, x.shape)
    rowwise, columnwise = usages(quantizer)
    if output is not None:
        check_block_output(output, quantizer, x, to_lazy)
        rowwise, columnwise = rowwise or output._rowwise_data is not None, columnwise or output._columnwise_data is not None
    options = form.options(quantizer)
    if noop is not None and "with_gemm_swizzled_scales" in options:
        options["with_gemm_swizzled_scales"] = output._with_gemm_swizzled_scales if output is not None else False
    buffers = _encoded(x, quantizer, rowwise, columnwise, options.get("with_gemm_swizzled_scales", False), given)
    if output is not None:
        return _fill(output, buffers, options, noop)
    fields = {name: buffers.get(name) for name in form.buffers}
    return build_quantized(quantizer, shape=x.shape, dtype=to_torch(dtype), **fields, **options)


def _encoded(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool, swizzled: bool, given: dict[str, Any]) -> dict[str, Tensor]:
    """The buffers of ``x``, by name."""
    form = block_format_of(quantizer)
    specs = form.buffer_specs(quantizer, x.shape, rowwise, columnwise)
    if not x.size:
        if getattr(quantizer, "stochastic_rounding", False):
            for _ in range(rowwise + columnwise):
                next_seed(x, "stochastic rounding")
        return {buffer: lazy.zeros(size, to_lazy(stored)) for buffer, (size, stored) in specs.items()}
    matrix = lazy.reshape(x, (outer(x.shape), x.shape[-1]))
    buffers, copies = _READER.codec(form).encode(matrix, quantizer, rowwise, columnwise, **given)
    for way, data, scales in copies:
        scales = padded(scales, specs[f"{way}_scale_inv"][0])
        buffers[f"{way}_data"] = lazy.reshape(data, specs[f"{way}_data"][0])
        buffers[f"{way}_scale_inv"] = _swizzled(scales, way == "columnwise" and form.blocks_first) if swizzled else scales
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


_READER = BlockReader("lazy", lambda shape, data: lazy.zeros(shape), _unswizzled)
block_values = _READER.values
mixed_transform = _READER.mixed_transform


def block_dense(x: Any) -> Tensor:
    """The value of ``x`` in fp32, from its row-wise copy where it has one, else from the column-wise one."""
    way = WAYS[x._rowwise_data is None]
    values, factor = block_values(x, way)
    if factor is not None:
        values = values * lazy.reshape(factor, (-1, 1) if way == "rowwise" else (1, -1))
    return lazy.reshape(values, logical_shape(x))
