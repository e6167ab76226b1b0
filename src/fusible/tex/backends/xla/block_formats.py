"""Block-scaled lazy tensors of every format: quantizing into new or given buffers, and reading the copies back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusible import lazy
from fusible.errors import ArgumentError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.block_fp8 import Copy, block_fp8_copies, block_fp8_values, mxfp8_copies, mxfp8_values
from fusible.tex.backends.xla.blocks import padded
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.backends.xla.fp8 import unless
from fusible.tex.backends.xla.nvfp4 import Random, nvfp4_amaxes, nvfp4_copies, nvfp4_values, transform_of
from fusible.tex.backends.xla.random import next_seed
from fusible.tex.block_layout import buffer_specs, check_block_output, check_block_quantizer, check_block_shape, storage_options, used_scales
from fusible.tex.factories import build_quantized
from fusible.tex.protocol import format_of, logical_shape, outer, scaling, to_torch, usages

__all__ = ["block_dense", "block_values", "mixed_transform", "quantize_blocks"]

_WAYS = ("rowwise", "columnwise")
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
        buffers[f"{way}_scale_inv"] = _swizzled(scales, _by_columns(name, way)) if swizzled else scales
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


def _by_columns(name: str, way: str) -> bool:
    """Whether the scales of a copy lie blocks first, and it is their transpose that is put in the order of a product."""
    return name == "mxfp8" and way == "columnwise"


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


def _compact(x: Any, way: str, shape: tuple[int, int]) -> Tensor:
    """The scales of a copy of the MXFP8 or NVFP4 tensor ``x`` in the order of its blocks, without padding."""
    name, scales = format_of(x), getattr(x, f"_{way}_scale_inv")
    if x._with_gemm_swizzled_scales:
        scales = _unswizzled(scales, _by_columns(name, way))
    lines, blocks = used_scales(name, shape, way == "columnwise", False)
    return scales[:lines, :blocks]


def block_values(x: Any, way: str, undo: bool = True) -> tuple[Tensor, Tensor | None]:
    """The fp32 matrix ``[M, K]`` that a copy of ``x`` stands for, but for a factor, which is the second: None, fp32 ``[1]``, or one per line.

    A line is a row of the row-wise copy, a column of the column-wise one. ``undo`` takes back a Hadamard transform. Raises ``ArgumentError`` where
    ``x`` lacks that copy.
    """
    data = getattr(x, f"_{way}_data")
    if data is None:
        got, do = f"only the {_WAYS[way == 'rowwise']} one", "quantize it with that usage"
        raise ArgumentError(expected(f"a {way} copy", of=f"a tensor of {format_of(x)}", got=got, do=do))
    full = logical_shape(x)
    shape = outer(full), full[-1]
    if not data.size:
        return lazy.zeros(shape), None
    name = format_of(x)
    if name == "block":
        return block_fp8_values(x, way, shape), None
    scales = _compact(x, way, shape)
    return (mxfp8_values(x, way, scales, shape), None) if name == "mxfp8" else nvfp4_values(x, way, scales, shape, undo)


def block_dense(x: Any) -> Tensor:
    """The value of ``x`` in fp32, from its row-wise copy where it has one, else from the column-wise one."""
    way = _WAYS[x._rowwise_data is None]
    values, factor = block_values(x, way)
    if factor is not None:
        values = values * lazy.reshape(factor, (-1, 1) if way == "rowwise" else (1, -1))
    return lazy.reshape(values, logical_shape(x))


def mixed_transform(a: Any, way_a: str, b: Any, way_b: str) -> bool:
    """Whether the Hadamard transforms of two operands fail to cancel in their product: one has one, and the other none."""
    transforms = [format_of(x) == "nvfp4" and transform_of(x, way) is not None for x, way in ((a, way_a), (b, way_b))]
    return transforms[0] != transforms[1]
