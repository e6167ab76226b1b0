"""MXFP8 by the compiled kernels: both copies from one read, and values in the type that products read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.calls.inference_tensors import writing
from fusible.tex.calls.scale_order import swizzle, unswizzle
from fusible.tex.factories import build_quantized
from fusible.tex.formats import WAYS, check_block_output, checked_format, usages
from fusible.tex.formats.block_reading import BlockReader
from fusible.tex.protocol import fp8_format

__all__ = ["operand_of_blocks", "quantize_blocks", "values_of_blocks"]

_LEVELS_OF_HALVES = frozenset({"avx512bf16", "amx"})
"""The levels at which a product of bf16 is one."""
_READER = BlockReader("cpu", lambda shape, data: torch.zeros(shape, dtype=torch.float32), unswizzle)


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
    if noop is not None:
        options["with_gemm_swizzled_scales"] = output is not None and output._with_gemm_swizzled_scales
    specs = form.buffer_specs(quantizer, x.shape, *asked)
    buffers = {name: (torch.empty if name.endswith("data") else torch.zeros)(size, dtype=stored) for name, (size, stored) in specs.items()}
    pairs = [(buffers.get(f"{way}_data"), buffers.get(f"{way}_scale_inv")) for way in WAYS]
    native.quantize_mxfp8(x, int(fp8_format(quantizer.dtype)), *pairs[0], *pairs[1], form.is_tiled(quantizer))
    if options["with_gemm_swizzled_scales"]:
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
    return _decoded(x, way, dtype)[0].view(_READER.stored(x, way)[0].shape(x))


def operand_of_blocks(x: Any, way: str) -> Tensor:
    """The values of a copy as a product reads them, a matrix: in bf16 where that holds all of them, and no product of two is subnormal or infinite;
    else in fp32."""
    if native.get_level() in _LEVELS_OF_HALVES:
        values, plain = _decoded(x, way, torch.bfloat16)
        if plain:
            return values
    return _decoded(x, way, torch.float32)[0]


def _decoded(x: Any, way: str, dtype: torch.dtype) -> tuple[Tensor, bool]:
    _, data, shape = _READER.stored(x, way)
    values = torch.empty(shape, dtype=dtype)
    if not values.numel():
        return values, True
    plain = native.dequantize_mxfp8(
        data.contiguous().view(shape), _READER.scales(x, way).contiguous(), way == "rowwise", values, int(fp8_format(x._fp8_dtype))
    )
    return values, plain
