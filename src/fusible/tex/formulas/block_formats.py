"""Block-scaled tensors of every format: quantizing into new or given buffers, and reading the copies back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.tex.factories import build_quantized
from fusible.tex.formats import (
    FLOAT8,
    WAYS,
    block_format_of,
    check_block_output,
    checked_format,
    format_of,
    logical_shape,
    transposed,
    usages,
)
from fusible.tex.formats.block_reading import BlockReader
from fusible.tex.formulas.arrays import Array, Arrays, Function
from fusible.tex.interface.arguments import QuantizedTensor
from fusible.tex.protocol import outer, to_torch

__all__ = ["BlockTensors"]


@dataclass(frozen=True, slots=True)
class BlockTensors:
    """A framework's own part: how scales are padded and put in the order of NVIDIA's products, and what is drawn for a tensor without elements."""

    arrays: Arrays
    reader: BlockReader
    padded: Function
    """``(matrix, shape)``: the matrix in the upper left of zeros of ``shape``."""
    swizzle: Function
    """``(scales, columnwise)``: scales in the order of NVIDIA's products."""
    draw: Function
    """``(count, like)``: draw ``count`` seeds and drop them, for a tensor without elements. A recorded program does not know which tensors are empty,
    so every tensor takes its seeds; then eager and compiled execution draw the same numbers."""

    def quantize(self, x: Array, quantizer: Any, dtype: Any, output: QuantizedTensor | None = None, noop: Array | None = None, **known: Any) -> Any:
        """``x`` quantized in blocks; into ``output``, where given, unless ``noop[0] == 1``. ``known``: what is known of it to the format's codec.

        Written are the copies that the quantizer asks for and those that ``output`` has. Raises before anything is written.
        """
        form = checked_format(quantizer, x.shape)
        rowwise, columnwise = usages(quantizer)
        if output is not None:
            check_block_output(output, quantizer, x, self.arrays.dtype)
            rowwise, columnwise = rowwise or output._rowwise_data is not None, columnwise or output._columnwise_data is not None
        options = form.options(quantizer)
        if noop is not None and "with_gemm_swizzled_scales" in options:
            options["with_gemm_swizzled_scales"] = output._with_gemm_swizzled_scales if output is not None else False
        buffers = self._encoded(x, quantizer, rowwise, columnwise, options.get("with_gemm_swizzled_scales", False), known)
        if output is not None:
            return self._fill(output, buffers, options, noop)
        fields = {name: buffers.get(name) for name in form.buffers}
        return build_quantized(quantizer, shape=tuple(x.shape), dtype=to_torch(dtype), **fields, **options)

    def dense(self, x: QuantizedTensor) -> Any:
        """The value of a quantized tensor of any format in fp32, from its row-wise copy where it has one, else from the column-wise one."""
        if format_of(x) is FLOAT8:
            return self._of_one_scale(x)
        xp, way = self.arrays, WAYS[x._rowwise_data is None]
        values, factor = self.reader.values(x, way)
        if factor is not None:
            values = xp.times(values, xp.reshape(factor, (-1, 1) if way == "rowwise" else (1, -1)))
        return xp.reshape(values, logical_shape(x))

    def _of_one_scale(self, x: QuantizedTensor) -> Any:
        xp = self.arrays
        scale_inv = x._scale_inv if len(logical_shape(x)) else xp.reshape(x._scale_inv, ())
        if x._data is not None:
            return xp.times(self.arrays.fp8.decode(x._data, x._fp8_dtype), scale_inv)
        data = transposed(x)
        if data is None:
            raise ArgumentError(expected("data or transposed data", of="a quantized tensor", got="neither", do="quantize it again"))
        return xp.permute(xp.times(self.arrays.fp8.decode(data, x._fp8_dtype), scale_inv), (*range(1, data.ndim), 0))

    def _encoded(self, x: Array, quantizer: Any, rowwise: bool, columnwise: bool, swizzled: bool, known: dict[str, Any]) -> dict[str, Any]:
        """The buffers of ``x``, by name."""
        xp, form = self.arrays, block_format_of(quantizer)
        specs = form.buffer_specs(quantizer, x.shape, rowwise, columnwise)
        if 0 in x.shape:
            if getattr(quantizer, "stochastic_rounding", False):
                self.draw(rowwise + columnwise, x)
            return {buffer: self.arrays.full(size, 0, self.arrays.dtype(stored), x) for buffer, (size, stored) in specs.items()}
        matrix = xp.reshape(x, (outer(x.shape), x.shape[-1]))
        buffers, copies = self.reader.codec(form).encode(matrix, quantizer, rowwise, columnwise, **known)
        for way, data, scales in copies:
            scales = self.padded(scales, specs[f"{way}_scale_inv"][0])
            buffers[f"{way}_data"] = xp.reshape(xp.contiguous(data), specs[f"{way}_data"][0])
            buffers[f"{way}_scale_inv"] = self.swizzle(scales, way == "columnwise" and form.blocks_first) if swizzled else scales
        return buffers

    def _fill(self, output: QuantizedTensor, buffers: dict[str, Any], options: dict[str, Any], noop: Array | None) -> Any:
        xp = self.arrays
        for name, new in buffers.items():
            buffer = getattr(output, f"_{name}")
            if buffer is None:
                setattr(output, f"_{name}", new)
            else:
                new = xp.reshape(new, buffer.shape)
                xp.put(buffer, new if noop is None else xp.unless(noop, buffer, new))
        for name, value in options.items():
            setattr(output, f"_{name}", value)
        return output
