"""Formats in blocks by the native kernels of a program: both copies from one read, and operands that products read as they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla import native
from fusible.tex.backends.xla.fp8 import reduced, tensor_amax
from fusible.tex.backends.xla.native import Result
from fusible.tex.backends.xla.nvfp4 import hadamard
from fusible.tex.backends.xla.random import next_seed
from fusible.tex.enums import DType
from fusible.tex.formats import FLOAT8_BLOCKS, MXFP8, NVFP4, BlockCodec, BlockFormat, Copy
from fusible.tex.formats.block_reading import BlockReader, Codes
from fusible.tex.formulas.nvfp4 import largest_value
from fusible.tex.protocol import fp8_format

__all__ = ["BlockKernels", "FORMATS", "codes_of_blocks", "with_kernels"]

_Encoded = tuple[dict[str, Any], Iterable[Copy]]


def _of_one(x: Any, way: str) -> float:
    return 1.0


class BlockKernels(NamedTuple):
    """``encode(x, quantizer, rowwise, columnwise)``: as of a codec; None where only products know the format. ``takes(quantizer)``: whether the
    kernels have its options. ``factor(x, way)``: that of all values of a copy, or None where lines have one each."""

    encode: Callable[[Tensor, Any, bool, bool], _Encoded] | None
    takes: Callable[[Any], bool] = lambda quantizer: True
    factor: Callable[[Any, str], Tensor | float | None] = _of_one


def with_kernels(form: BlockFormat, codec: BlockCodec) -> BlockCodec:
    """A codec that encodes by the kernel of its format where that serves."""
    kernels = FORMATS[form]

    def encode(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool, **known: Any) -> _Encoded:
        if known or kernels.encode is None or not kernels.takes(quantizer) or not native.serves(x):
            return codec.encode(x, quantizer, rowwise, columnwise, **known)
        return kernels.encode(x, quantizer, rowwise, columnwise)

    return codec._replace(encode=encode)


def codes_of_blocks(reader: BlockReader, x: Any, way: str, undo: bool) -> Codes | None:
    """A copy as a product reads it; None where lines have a factor each, or a transform to ``undo``, and of a format that the kernels do not know."""
    form, data, shape = reader.stored(x, way)
    kernels = FORMATS.get(form)
    factor = None if kernels is None else kernels.factor(x, way)
    if kernels is None or factor is None or (undo and reader.transform(x, way) is not None):
        return None
    turned = form.transposed and way == "columnwise"
    codes = lazy.reshape(data, (shape[1] if turned else shape[0], -1))
    scales = reader.scales_of(form, shape, x, way)
    return Codes(codes, turned, DType(int(form.element(x))), scales, form.has_tile_scales(x), factor)


def _encode_mxfp8(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool) -> _Encoded:
    (rows, cols), arguments = x.shape, {"src": x, "fp8_dtype": int(fp8_format(quantizer.dtype)), "tiled": MXFP8.is_tiled(quantizer)}
    copies = {
        "rowwise": ("dst", Result((rows, cols), lazy.uint8), "exponents", Result((rows, cols // MXFP8.length), lazy.uint8)),
        "columnwise": ("dst_columns", Result((rows, cols), lazy.uint8), "exponents_columns", Result((rows // MXFP8.length, cols), lazy.uint8)),
    }
    return _both("quantize_mxfp8", arguments, copies, rowwise, columnwise)


def _encode_float8_blocks(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool) -> _Encoded:
    (rows, cols), tiled = x.shape, FLOAT8_BLOCKS.is_tiled(quantizer)
    down, across = (-(-size // FLOAT8_BLOCKS.length) for size in (rows, cols))
    options = {"tiled": tiled, "epsilon": float(quantizer.amax_epsilon), "power_of_two": bool(quantizer.force_pow_2_scales)}
    of_rows, of_columns = ((down, across), (across, down)) if tiled else ((across, rows), (down, cols))
    copies = {
        "rowwise": ("dst", Result((rows, cols), lazy.uint8), "scale_inv", Result(of_rows, lazy.float32)),
        "columnwise": ("dst_columns", Result((cols, rows), lazy.uint8), "scale_inv_columns", Result(of_columns, lazy.float32)),
    }
    return _both("quantize_block_fp8", {"src": x, "fp8_dtype": int(fp8_format(quantizer.dtype)), **options}, copies, rowwise, columnwise)


def _both(kernel: str, arguments: dict[str, Any], copies: dict[str, tuple[str, Result, str, Result]], rowwise: bool, columnwise: bool) -> _Encoded:
    """The copies that are asked for, by one call."""
    asked = [way for way, wanted in (("rowwise", rowwise), ("columnwise", columnwise)) if wanted]
    for way in asked:
        data, of_data, scales, of_scales = copies[way]
        arguments |= {data: of_data, scales: of_scales}
    written = native.call(kernel, arguments)
    return {}, [(way, written[copies[way][0]], written[copies[way][2]]) for way in asked]


def _transformed(x: Tensor, matrix: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The columns of x transformed, and the amax of each copy."""
    amaxes = {name: Result((1,), lazy.float32) for name in ("out", "source_amax")}
    given = {"src": x, "transform": lazy.cast(matrix, lazy.float32)}
    written = native.call("transform_columns", {**given, "dst": Result(x.shape, lazy.bfloat16), **amaxes})
    return written["dst"], {"rowwise": written["source_amax"], "columnwise": written["out"]}


def _encode_nvfp4(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool) -> _Encoded:
    ways = [way for way, wanted in (("rowwise", rowwise), ("columnwise", columnwise)) if wanted]
    sources, copies = dict.fromkeys(ways, x), []
    if columnwise and quantizer.with_rht:
        sources["columnwise"], found = _transformed(x, hadamard(quantizer))
    else:
        found = dict.fromkeys(ways, tensor_amax(x))
    amaxes = {way: reduced(found[way], quantizer) for way in ways}
    for way, amax in amaxes.items():
        columns = way == "columnwise"
        lines, length = x.shape[::-1] if columns else x.shape
        arguments: dict[str, Any] = {"src": sources[way], "amax": amax, "columns": columns, "tiled": NVFP4.is_tiled(quantizer)}
        if quantizer.stochastic_rounding:
            arguments["seed"] = next_seed(x, "stochastic rounding")
        results = {"dst": Result((lines, length // 2), lazy.uint8), "scale_bytes": Result((lines, length // NVFP4.length), lazy.uint8)}
        written = native.call("quantize_nvfp4", {**arguments, **results})
        copies.append((way, written["dst"], written["scale_bytes"]))
    return {f"amax_{way}": amax for way, amax in amaxes.items()}, copies


def _factor_of_nvfp4(x: Any, way: str) -> Tensor | None:
    amax: Tensor = getattr(x, f"_amax_{way}")
    return amax / largest_value(x) if amax.size == 1 else None


FORMATS: dict[BlockFormat, BlockKernels] = {
    FLOAT8_BLOCKS: BlockKernels(_encode_float8_blocks),
    MXFP8: BlockKernels(_encode_mxfp8),
    NVFP4: BlockKernels(
        _encode_nvfp4,
        lambda quantizer: not (quantizer.nvfp4_use_4over6 or quantizer.row_scaled_nvfp4),
        _factor_of_nvfp4,
    ),
}
"""The formats in blocks that the kernels know."""
