"""Formats in blocks by the compiled kernels: the copies of a tensor, and values in the type that products read; a row for each that they know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.calls.inference_tensors import writing
from fusible.tex.calls.scale_order import swizzle, unswizzle
from fusible.tex.factories import build_quantized
from fusible.tex.formats import FLOAT8_BLOCKS, MXFP8, WAYS, BlockFormat, check_block_output, checked_format, format_of, usages
from fusible.tex.formats.block_reading import BlockReader
from fusible.tex.protocol import fp8_format

__all__ = ["FORMATS", "Operand", "operand_of_blocks", "quantize_blocks", "values_of_blocks"]

_LEVELS_OF_HALVES = frozenset({"avx512bf16", "amx"})
"""The levels at which a product of bf16 is one."""
_READER = BlockReader("cpu", lambda shape, data: torch.zeros(shape, dtype=torch.float32), unswizzle)

Buffers = dict[str, Tensor]


class _Kernels(NamedTuple):
    """What encodes and decodes a format.

    ``encode(x, quantizer, buffers)``: fill the buffers, scales in the order of their blocks. ``decode(x, way, scales, values)``: fill ``values``, of
    the stored shape of a copy, and say whether bf16 holds every one of them and no product of two is subnormal or infinite. ``never(scales)``:
    whether bf16 cannot hold values with these scales, so that nobody asks for them.
    """

    encode: Callable[[Tensor, Any, Buffers], None]
    decode: Callable[[Any, str, Tensor, Tensor], bool]
    never: Callable[[Tensor], bool] = lambda scales: False


class Operand(NamedTuple):
    """The values of a copy as they are stored, a matrix: transposed, where ``turned``."""

    values: Tensor
    turned: bool


def quantize_blocks(x: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """``x`` (contiguous) quantized; into ``output``, where given, unless ``noop[0] == 1``.

    Written are the copies that the quantizer asks for and those that ``output`` has. Raises before anything is written.
    """
    form = checked_format(quantizer, x.shape)
    asked = usages(quantizer)
    if output is not None:
        check_block_output(output, quantizer, x)
        asked = asked[0] or output._rowwise_data is not None, asked[1] or output._columnwise_data is not None
    options = form.options(quantizer)
    swizzled = "with_gemm_swizzled_scales"
    if noop is not None and swizzled in options:
        options[swizzled] = output is not None and output._with_gemm_swizzled_scales
    specs = form.buffer_specs(quantizer, x.shape, *asked)
    buffers = {name: (torch.empty if name.endswith("data") else torch.zeros)(size, dtype=stored) for name, (size, stored) in specs.items()}
    FORMATS[form].encode(x, quantizer, buffers)
    if options.get(swizzled):
        for way in WAYS:
            name = f"{way}_scale_inv"
            if name in buffers:
                buffers[name] = swizzle(buffers[name], way == "columnwise" and form.blocks_first)
    if output is None:
        return build_quantized(quantizer, shape=tuple(x.shape), dtype=x.dtype, **{name: buffers.get(name) for name in form.buffers}, **options)
    return _fill(output, buffers, options, skip=noop is not None and noop.item() == 1)


def _fill(output: Any, buffers: dict[str, Tensor], options: dict[str, Any], *, skip: bool) -> Any:
    for name, new in buffers.items():
        held = getattr(output, f"_{name}")
        if held is None:
            setattr(output, f"_{name}", new)
        elif not skip:
            with writing(held):
                held.copy_(new.view(held.shape))
    for name, value in options.items():
        setattr(output, f"_{name}", value)
    return output


def values_of_blocks(x: Any, dtype: torch.dtype) -> Tensor:
    """The value of a tensor in ``dtype``, from its row-wise copy where it has one, else from the column-wise one."""
    way = WAYS[x._rowwise_data is None]
    (values, turned), _ = _decoded(x, way, dtype)
    shape = _form_of(x).shape(x)
    return (values.t().contiguous() if turned else values).view(shape)


def operand_of_blocks(x: Any, way: str) -> Operand:
    """The values of a copy as a product reads them: in bf16 where that holds all of them, and no product of two is subnormal or infinite; else in
    fp32."""
    if native.get_level() in _LEVELS_OF_HALVES and not FORMATS[_form_of(x)].never(_READER.scales(x, way)):
        operand, plain = _decoded(x, way, torch.bfloat16)
        if plain:
            return operand
    return _decoded(x, way, torch.float32)[0]


def _form_of(x: Any) -> BlockFormat:
    form = format_of(x)
    assert isinstance(form, BlockFormat)
    return form


def _decoded(x: Any, way: str, dtype: torch.dtype) -> tuple[Operand, bool]:
    form, _, shape = _READER.stored(x, way)
    turned = form.transposed and way == "columnwise"
    values = torch.empty(shape[::-1] if turned else shape, dtype=dtype)
    plain = not values.numel() or FORMATS[form].decode(x, way, _READER.scales(x, way).contiguous(), values)
    return Operand(values, turned), plain


def _copies(buffers: Buffers) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Data and scales of each copy, None for what is not asked for: in the order in which kernels take them."""
    row_data, row_scales, column_data, column_scales = (buffers.get(f"{way}_{part}") for way in WAYS for part in ("data", "scale_inv"))
    return row_data, row_scales, column_data, column_scales


def _encode_mxfp8(x: Tensor, quantizer: Any, buffers: Buffers) -> None:
    native.quantize_mxfp8(x, int(fp8_format(quantizer.dtype)), *_copies(buffers), MXFP8.is_tiled(quantizer))


def _decode_mxfp8(x: Any, way: str, scales: Tensor, values: Tensor) -> bool:
    data = getattr(x, f"_{way}_data").contiguous().view(values.shape)
    return native.dequantize_mxfp8(data, scales, way == "rowwise", values, int(fp8_format(x._fp8_dtype)))


def _encode_block_fp8(x: Tensor, quantizer: Any, buffers: Buffers) -> None:
    rule = FLOAT8_BLOCKS.is_tiled(quantizer), quantizer.amax_epsilon, quantizer.force_pow_2_scales
    native.quantize_block_fp8(x, int(fp8_format(quantizer.dtype)), *_copies(buffers), *rule)


def _decode_block_fp8(x: Any, way: str, scales: Tensor, values: Tensor) -> bool:
    data = getattr(x, f"_{way}_data").contiguous().view(values.shape)
    return native.dequantize_block_fp8(data, scales, FLOAT8_BLOCKS.has_tile_scales(x), values, int(fp8_format(x._fp8_dtype)))


def _are_uneven(scales: Tensor) -> bool:
    """Whether one of them is no power of two."""
    return bool((scales.view(torch.int32) & 0x7FFFFF).any())


FORMATS: dict[BlockFormat, _Kernels] = {
    FLOAT8_BLOCKS: _Kernels(_encode_block_fp8, _decode_block_fp8, _are_uneven),
    MXFP8: _Kernels(_encode_mxfp8, _decode_mxfp8),
}
"""The formats in blocks that the kernels know."""
