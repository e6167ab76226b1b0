"""Formats in blocks by the compiled kernels: the copies of a tensor, and values in the type that products read; a row for each that they know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.backends.cpu.kernel_calls import call as kernel_call
from fusible.tex.backends.cpu.layouts import HOST, as_read
from fusible.tex.calls.inference_tensors import writing
from fusible.tex.calls.scale_order import swizzle, unswizzle
from fusible.tex.calls.seeds import draw_seeds
from fusible.tex.enums import DType
from fusible.tex.factories import build_quantized
from fusible.tex.formats import (
    FLOAT8_BLOCKS,
    MXFP8,
    NVFP4,
    WAYS,
    BlockFormat,
    Format,
    block_format_of,
    check_block_output,
    checked_format,
    format_of,
    scheme_of,
    usages,
)
from fusible.tex.formats.block_reading import BlockReader, Codes
from fusible.tex.formulas.nvfp4 import largest_value
from fusible.tex.interface.kernel_calls import Buffer, KernelCall, View, view_of
from fusible.tex.protocol import fp8_format, outer, process_group

__all__ = [
    "BlockKernels",
    "FORMATS",
    "Operand",
    "StoredCodes",
    "codes_of_blocks",
    "fails_to_cancel",
    "operand_of_blocks",
    "quantize_blocks",
    "stored_codes",
    "takes",
    "values_of_blocks",
]

_READER = BlockReader("cpu", lambda shape, data: torch.zeros(shape, dtype=torch.float32, device=HOST), unswizzle)

Buffers = dict[str, Tensor]


def _none(x: Any, way: str) -> None:
    return None


class BlockKernels(NamedTuple):
    """What encodes and decodes a format. One whose codes products read is here though nothing compiled encodes it.

    ``encode(x, quantizer, buffers)``: fill the buffers, scales in the order of their blocks; None where torch's is as good.
    ``decode(x, way, scales, values)``: fill ``values``, of the stored shape of a copy, and say whether bf16 holds every one of them and no product
    of two is subnormal or infinite. ``largest(x)``: by what a copy's amaxes, one or one for each line, are divided (in fp32) to give what its values
    are still to be multiplied by; None where there is nothing. ``transform(x, way)``: the matrix by which lines were multiplied in groups, or None.
    ``takes(quantizer)``: whether the kernels have its options. ``never(scales)``: whether bf16 cannot hold values of these scales, so that nobody
    asks for them.
    """

    encode: Callable[[Tensor, Any, Buffers], None] | None
    decode: Callable[[Any, str, Tensor, Tensor], bool]
    largest: Callable[[Any], float] | None = None
    transform: Callable[[Any, str], Tensor | None] = _none
    takes: Callable[[Any], bool] = lambda quantizer: True
    never: Callable[[Tensor], bool] = lambda scales: False

    def factor(self, x: Any, way: str) -> Tensor | None:
        """By what the values of a copy are still to be multiplied."""
        if self.largest is None:
            return None
        amax: Tensor = getattr(x, f"_amax_{way}")
        return amax / torch.full_like(amax, self.largest(x))


class Operand(NamedTuple):
    """The values of a copy as they are stored, a matrix: transposed, where ``turned``; and the factor of all."""

    values: Tensor
    turned: bool
    factor: Tensor | float


class StoredCodes(NamedTuple):
    """An operand of a product where it lies, for a kernel's call: data and scales are tensors or parts of such, transposed where ``turned``; the
    factor of all is a number, a tensor of one, or what the calls ``before`` make."""

    data: Tensor | View
    turned: bool
    dtype: torch.dtype | int
    scales: Tensor | View | None
    tiled: bool
    factor: Tensor | Buffer | float
    before: tuple[KernelCall, ...] = ()


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
    buffers = {
        name: (torch.empty if name.endswith("data") else torch.zeros)(size, dtype=stored, device=HOST) for name, (size, stored) in specs.items()
    }
    if x.numel():
        encode = FORMATS[form].encode
        assert encode is not None
        encode(x, quantizer, buffers)
    elif getattr(quantizer, "stochastic_rounding", False):
        draw_seeds(sum(asked))
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
        buffer = getattr(output, f"_{name}")
        if buffer is None:
            setattr(output, f"_{name}", new)
        elif not skip:
            with writing(buffer):
                buffer.copy_(new.view(buffer.shape))
    for name, value in options.items():
        setattr(output, f"_{name}", value)
    return output


def takes(quantizer: Any) -> bool:
    """Whether the kernels have the options of a quantizer."""
    scheme = scheme_of(quantizer)
    if scheme.per_tensor:
        return True
    kernels = FORMATS[block_format_of(quantizer)]
    return kernels.encode is not None and kernels.takes(quantizer)


def values_of_blocks(x: Any, dtype: torch.dtype) -> Tensor:
    """The value of a tensor in ``dtype``, from its row-wise copy where it has one, else from the column-wise one."""
    form, way = _form_of(x), WAYS[x._rowwise_data is None]
    factor, matrix, shape = FORMATS[form].factor(x, way), FORMATS[form].transform(x, way), form.shape(x)
    values, turned, _ = _decoded(x, way, _scales(x, way), dtype if factor is matrix is None else torch.float32)
    if matrix is not None:
        values = _undone(values, matrix)
    if factor is not None:
        values = values.mul_(factor.view(-1, 1)).to(dtype)
    return values.t().contiguous().view(shape) if turned else values.view(shape)


def operand_of_blocks(x: Any, way: str, undo: bool = False) -> Operand:
    """The values of a copy as a product reads them: in bf16 where that holds all of them, and no product of two is subnormal or infinite; else in
    fp32. ``undo`` takes back a transform of lines."""
    kernels, operand, scales = FORMATS[_form_of(x)], None, _scales(x, way)
    factor, matrix = kernels.factor(x, way), kernels.transform(x, way) if undo else None
    by_lines = factor is not None and factor.numel() > 1
    if matrix is None and not by_lines and native.multiplies_halves() and not kernels.never(scales):
        values, turned, plain = _decoded(x, way, scales, torch.bfloat16)
        operand = (values, turned) if plain else None
    values, turned = operand or _decoded(x, way, scales, torch.float32)[:2]
    if matrix is not None:
        values = _undone(values, matrix)
    if factor is not None and by_lines:
        values, factor = values.mul_(factor.view(-1, 1)), None
    return Operand(values, turned, 1.0 if factor is None else factor)


def codes_of_blocks(x: Any, way: str, undo: bool = False) -> Codes | None:
    """A copy as a product reads it, with nothing decoded before; None where lines have a factor each, or a transform to ``undo``."""
    form, data, shape = _READER.stored(x, way)  # or the one sentence about a copy that is not there
    kernels = FORMATS[form]
    factor = kernels.factor(x, way)
    if (factor is not None and factor.numel() > 1) or (undo and kernels.transform(x, way) is not None):
        return None
    turned = form.transposed and way == "columnwise"
    codes = data.contiguous().view(shape[1] if turned else shape[0], -1)
    scales = _READER.scales_of(form, shape, x, way).contiguous()
    if form.packed > 1 and form.scales_are_exponents:  # which tells them from those of NVFP4
        scales = scales.view(torch.float8_e8m0fnu)
    return Codes(codes, turned, DType(int(form.element(x))), scales, form.has_tile_scales(x), 1.0 if factor is None else factor)


def stored_codes(x: Any, way: str) -> StoredCodes | None:
    """``codes_of_blocks`` where they lie; None where one of their tensors does not lie as it is read."""
    codes, form = codes_of_blocks(x, way), _form_of(x)
    data, scales = getattr(x, f"_{way}_data"), getattr(x, f"_{way}_scale_inv")
    if codes is None or form.is_swizzled(x) or not as_read(data, scales):
        return None
    described = StoredCodes(
        data if data.shape == codes.data.shape else view_of(data, codes.data),
        codes.turned,
        int(codes.dtype),
        scales if scales.dtype is codes.scales.dtype else view_of(scales, scales.view(codes.scales.dtype)),
        codes.tiled,
        1.0,
    )
    largest = FORMATS[form].largest
    if largest is None:
        return described
    amax, factor = getattr(x, f"_amax_{way}"), Buffer(torch.float32, (1,))
    return described._replace(factor=factor, before=(kernel_call("quotient", src=amax, by=largest(x), dst=factor),)) if as_read(amax) else None


def fails_to_cancel(a: Any, way_a: str, b: Any, way_b: str) -> bool:
    """Whether of two operands of a product the one was transformed and the other was not."""
    transforms = [
        None if form not in FORMATS else FORMATS[form].transform(x, way) for x, way, form in ((a, way_a, format_of(a)), (b, way_b, format_of(b)))
    ]
    return (transforms[0] is None) != (transforms[1] is None)


def _undone(values: Tensor, matrix: Tensor) -> Tensor:
    groups = values.view(-1, matrix.shape[0])
    return torch.mm(groups, matrix.t().to(values.dtype)).view(values.shape)


def _form_of(x: Any) -> BlockFormat:
    form = format_of(x)
    assert isinstance(form, BlockFormat)
    return form


def _scales(x: Any, way: str) -> Tensor:
    """Those of a copy in the order of its blocks."""
    scales: Tensor = _READER.scales(x, way)
    return scales.contiguous()


def _decoded(x: Any, way: str, scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool, bool]:
    """The values of a copy as they are stored, whether that is transposed, and whether they are as ``BlockKernels.decode`` says."""
    form, _, shape = _READER.stored(x, way)
    turned = form.transposed and way == "columnwise"
    values = torch.empty(shape[::-1] if turned else shape, dtype=dtype, device=HOST)
    plain = not values.numel() or FORMATS[form].decode(x, way, scales, values)
    return values, turned, plain


def _copies(buffers: Buffers) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Data and scales of each copy, None for what is not asked for: in the order in which kernels take them."""
    row_data, row_scales, column_data, column_scales = (buffers.get(f"{way}_{part}") for way in WAYS for part in ("data", "scale_inv"))
    return row_data, row_scales, column_data, column_scales


def _encode_mxfp8(x: Tensor, quantizer: Any, buffers: Buffers) -> None:
    native.quantize_mxfp8(x, int(fp8_format(quantizer.dtype)), *_copies(buffers), MXFP8.is_tiled(quantizer))


def _decode_mxfp8(x: Any, way: str, scales: Tensor, values: Tensor) -> bool:
    data = getattr(x, f"_{way}_data").contiguous().view(values.shape)
    return native.dequantize_mxfp8(data, scales, way == "rowwise", values, int(fp8_format(x._fp8_dtype)))


def _encode_nvfp4(x: Tensor, quantizer: Any, buffers: Buffers) -> None:
    matrix = x.view(outer(x.shape), x.shape[-1])
    ways = [way for way in WAYS if f"{way}_data" in buffers]
    sources, amaxes = dict.fromkeys(ways, matrix), [buffers[f"amax_{way}"] for way in ways]
    if quantizer.with_rht and "columnwise" in ways:
        source = sources["columnwise"] = torch.empty(matrix.shape, dtype=torch.bfloat16, device=HOST)
        of_rows = buffers["amax_rowwise"].view(1) if "rowwise" in ways else None
        native.transform_columns(matrix, _of_kernels(quantizer.rht_matrix), source, buffers["amax_columnwise"].view(1), of_rows)
    else:
        plain = native.amax(matrix)
        for amax in amaxes:
            amax.fill_(plain)
    for amax in amaxes:
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=process_group(quantizer.amax_reduction_group))
    for way in ways:
        seed = draw_seeds(1) if quantizer.stochastic_rounding else None
        stored = buffers[f"{way}_data"], buffers[f"{way}_scale_inv"], way == "columnwise", NVFP4.is_tiled(quantizer)
        native.quantize_nvfp4(sources[way], buffers[f"amax_{way}"], *stored, seed)


def _of_kernels(matrix: Tensor) -> Tensor:
    return matrix.to("cpu", torch.float32).contiguous()


def _decode_nvfp4(x: Any, way: str, scales: Tensor, values: Tensor) -> bool:
    native.dequantize_nvfp4(getattr(x, f"_{way}_data").contiguous(), scales, values)
    return True


def _transform_of_nvfp4(x: Any, way: str) -> Tensor | None:
    quantizer = x._quantizer
    return _of_kernels(quantizer.rht_matrix) if way == "columnwise" and quantizer is not None and quantizer.with_rht else None


def _encode_block_fp8(x: Tensor, quantizer: Any, buffers: Buffers) -> None:
    rule = FLOAT8_BLOCKS.is_tiled(quantizer), quantizer.amax_epsilon, quantizer.force_pow_2_scales
    native.quantize_block_fp8(x, int(fp8_format(quantizer.dtype)), *_copies(buffers), *rule)


def _decode_block_fp8(x: Any, way: str, scales: Tensor, values: Tensor) -> bool:
    data = getattr(x, f"_{way}_data").contiguous().view(values.shape)
    return native.dequantize_block_fp8(data, scales, FLOAT8_BLOCKS.has_tile_scales(x), values, int(fp8_format(x._fp8_dtype)))


def _are_uneven(scales: Tensor) -> bool:
    """Whether one of them is no power of two."""
    return bool((scales.view(torch.int32) & 0x7FFFFF).any())


FORMATS: dict[Format, BlockKernels] = {
    FLOAT8_BLOCKS: BlockKernels(_encode_block_fp8, _decode_block_fp8, never=_are_uneven),
    MXFP8: BlockKernels(_encode_mxfp8, _decode_mxfp8),
    NVFP4: BlockKernels(
        _encode_nvfp4,
        _decode_nvfp4,
        largest_value,
        _transform_of_nvfp4,
        lambda quantizer: not (quantizer.nvfp4_use_4over6 or quantizer.row_scaled_nvfp4),
    ),
}
"""The formats in blocks that the kernels know."""
