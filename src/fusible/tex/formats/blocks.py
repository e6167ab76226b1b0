"""Block-scaled formats: which buffers a quantized tensor has, their shapes and types, and what a quantizer of them may ask for.

A tensor ``[*leading, K]`` is a matrix of ``M`` rows. Its row-wise copy has one scale per block of elements along a row, its column-wise copy one per
block along a column; with two-dimensional scaling both have one per square tile. The names of the buffers are those that NVIDIA's constructors give
them; the attributes of a tensor have an underscore before.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from fusible.errors import DTypeError, ShapeError, expected
from fusible.tex.formats.format import Format, format_of, scheme_of
from fusible.tex.protocol import QuantizerLike, TensorLike, check_no_part, check_same_device, check_shape, fp8_format, outer, transposed_shape

__all__ = ["BlockCodec", "BlockFormat", "Copy", "WAYS", "block_format_of", "check_block_output", "check_scales", "checked_format"]

WAYS = ("rowwise", "columnwise")
"""The copies that a tensor may have."""

Copy = tuple[str, Any, Any]
"""``"rowwise"`` or ``"columnwise"``, and data and scales of that copy as they are stored, but for padding and order."""


def _no_transform(x: Any, way: str) -> None:
    return None


class BlockCodec(NamedTuple):
    """A backend's own part of a format.

    ``encode(matrix, quantizer, rowwise, columnwise, **given)``: the buffers of a matrix ``[M, K]`` beside data and scales, by name, and its copies;
    ``known`` is what a caller knows beforehand, as the amaxes of NVFP4. ``decode(x, way, scales, shape, undo)``: the fp32 matrix of ``shape`` that a
    copy of ``x`` stands for, but for a factor, which is the second: None, fp32 ``[1]``, or one per line; ``scales`` are those of its blocks in order,
    without padding. ``transform(x, way)``: the orthonormal matrix by which the lines of a copy were multiplied in groups, or None; ``undo`` takes
    it back.
    """

    encode: Callable[..., tuple[dict[str, Any], Iterable[Copy]]]
    decode: Callable[..., tuple[Any, Any]]
    transform: Callable[[Any, str], Any] = _no_transform


class BlockFormat(Format):
    """A format with one scale per block of ``length`` elements. ``name`` is also the name of its one scheme."""

    block_scaled = True
    length: ClassVar[int]
    whole: ClassVar[bool] = True
    """Whether blocks must be full."""
    scale_dtype: ClassVar[torch.dtype] = torch.uint8
    """The type in which scales are stored: E8M0 and E4M3 as bytes."""
    swizzles: ClassVar[bool] = True
    """Whether scales may lie in the order of NVIDIA's products (``_with_gemm_swizzled_scales``)."""
    blocks_first: ClassVar[bool] = False
    """Whether the scales of the column-wise copy lie blocks first, as ``[M / length, K]``: then it is their transpose that is put in that order."""
    buffers: ClassVar[tuple[str, ...]] = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    """All that a tensor may have, by the names of its constructor."""
    member_fields: ClassVar[Mapping[str, str]] = {
        "rowwise_data": "_rowwise_data",
        "columnwise_data": "_columnwise_data",
        "scale_inv": "_rowwise_scale_inv",
        "columnwise_scale_inv": "_columnwise_scale_inv",
    }
    scale_fields = ("rowwise_scale_inv", "columnwise_scale_inv")

    def __init__(self) -> None:
        self.codecs: dict[str, BlockCodec] = {}
        """By the name of the array framework what encodes and decodes it: a backend registers its own where it is loaded."""

    def is_tiled(self, quantizer: Any) -> bool:
        """Whether ``quantizer`` takes one scale per square tile."""
        return bool(getattr(quantizer, "with_2d_quantization", False))

    def has_tile_scales(self, x: Any) -> bool:
        """Whether the scales of a tensor are stored one for a tile: other formats repeat them for each line of a tile."""
        return False

    def is_swizzled(self, x: Any) -> bool:
        """Whether the scales of a tensor lie in the order of NVIDIA's products."""
        return self.swizzles and bool(x._with_gemm_swizzled_scales)

    def rows_second(self, columnwise: bool, tiled: bool) -> bool:
        """Whether the second dimension of a copy's scales runs along the tensor's rows."""
        return columnwise and self.transposed

    def block(self, way: str, tiled: bool) -> tuple[int, int]:
        """Rows and columns of the matrix that have one scale."""
        return (self.length, self.length) if tiled else (1, self.length) if way == "rowwise" else (self.length, 1)

    def data_shape(self, shape: Sequence[int], columnwise: bool) -> tuple[int, ...]:
        """The shape of the data of a tensor of ``shape``. Elements of half a byte are packed along the last stored dimension."""
        stored = transposed_shape(shape) if columnwise and self.transposed else tuple(shape)
        if self.packed == 1:
            return stored
        if stored[-1] % self.packed:  # rows are only even together
            stored = (stored[0], outer(shape))
        return (*stored[:-1], stored[-1] // self.packed)

    def used_scales(self, shape: Sequence[int], columnwise: bool, tiled: bool) -> tuple[int, int]:
        """The shape of the scales that mean something: the first rows and columns of the matrix of scales."""
        rows, columns = outer(shape), shape[-1]
        row_blocks, column_blocks = -(-rows // self.length), -(-columns // self.length)
        if columnwise:
            return (row_blocks, columns) if self.blocks_first else (columns, row_blocks)
        return rows, column_blocks

    def scale_multiples(self, columnwise: bool) -> tuple[int, int]:
        """What the lines and blocks of scales are padded to multiples of, as NVIDIA's products read them."""
        return (4, 128) if columnwise and self.blocks_first else (128, 4)

    def scale_shape(self, shape: Sequence[int], columnwise: bool, tiled: bool) -> tuple[int, int]:
        """The shape of the matrix of scales, padded."""
        (lines, blocks), multiples = self.used_scales(shape, columnwise, tiled), self.scale_multiples(columnwise)
        return -(-lines // multiples[0]) * multiples[0], -(-blocks // multiples[1]) * multiples[1]

    def buffer_specs(self, quantizer: Any, shape: Sequence[int], rowwise: bool, columnwise: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of every buffer of a tensor of ``shape`` with the given copies, by name."""
        tiled, specs = self.is_tiled(quantizer), {}
        for way, asked in zip(WAYS, (rowwise, columnwise), strict=True):
            if asked:
                specs[f"{way}_data"] = self.data_shape(shape, way == "columnwise"), torch.uint8
                specs[f"{way}_scale_inv"] = self.scale_shape(shape, way == "columnwise", tiled), self.scale_dtype
        return specs

    @abstractmethod
    def options(self, quantizer: Any) -> dict[str, Any]:
        """What beside the buffers a tensor of ``quantizer`` is made of, by the names of the constructor."""

    def check_quantizer(self, quantizer: Any) -> None:
        """Raise for a combination of options that has no meaning."""
        fp8_format(quantizer.dtype)

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of ``shape`` consists of whole blocks, where that is asked for."""
        return len(shape) > 0 and not (self.whole and (shape[-1] % self.length or outer(shape) % self.length))


def block_format_of(quantizer: QuantizerLike) -> BlockFormat:
    """The format of a quantizer that scales blocks."""
    form = scheme_of(quantizer).format
    assert isinstance(form, BlockFormat), f"{form} has no blocks"
    return form


def check_scales(scales: Any, least: Sequence[int], whole: Sequence[int], of: str) -> None:
    """Raise ``ShapeError`` unless ``scales`` is a matrix of at least ``least`` lines and blocks, so that no two blocks share a scale. ``whole``: the
    padded shape, for the sentence."""
    if scales is None or len(scales.shape) != 2 or scales.shape[0] < least[0] or scales.shape[1] < least[1]:
        got = "None" if scales is None else list(scales.shape)
        raise ShapeError(expected(f"shape {list(whole)}", of=of, got=got, do="pass one scale per block, padded"))


def checked_format(quantizer: QuantizerLike, shape: Sequence[int]) -> BlockFormat:
    """The format of a quantizer that scales blocks. Raises where its options have no meaning, or a tensor of ``shape`` cannot be quantized to it."""
    form = block_format_of(quantizer)
    form.check_quantizer(quantizer)
    if not shape:
        raise ShapeError(expected("at least one dimension", of="a tensor to quantize in blocks", got="none", do="reshape it"))
    if not form.fits(shape):
        wanted = f"rows and columns in multiples of {form.length}"
        raise ShapeError(expected(wanted, of=f"a tensor to quantize to {form.name.upper()}", got=list(shape), do="pad it with zeros"))
    return form


def check_block_output(output: Any, quantizer: QuantizerLike, x: TensorLike, stored: Callable[[torch.dtype], Any] = lambda dtype: dtype) -> None:
    """Raise unless ``output`` is a tensor of ``quantizer``'s format into which ``x`` fits; ``stored`` gives the backend's value of a dtype."""
    form = block_format_of(quantizer)
    if format_of(output) is not form:
        got = type(output).__qualname__
        raise DTypeError(expected(f"a quantized tensor of {form}", of="output of quantize", got=got, do="make one by quantizer.make_empty"))
    check_no_part(output, "output of quantize")
    shape = form.shape(output)
    if outer(shape) != outer(x.shape) or shape[-1] != x.shape[-1]:
        check_shape(x, shape, "the tensor quantized into output")
    for buffer, (wanted, dtype) in form.buffer_specs(quantizer, shape, True, True).items():
        buffer_of_output = getattr(output, f"_{buffer}")
        if buffer_of_output is None:
            continue
        size = math.prod(buffer_of_output.shape)
        if (
            size != math.prod(wanted)
            or (not buffer.endswith("data") and tuple(buffer_of_output.shape) != wanted)
            or buffer_of_output.dtype is not stored(dtype)
        ):
            got = f"{buffer_of_output.dtype} {list(buffer_of_output.shape)}"
            raise ShapeError(expected(f"{dtype} {list(wanted)}", of=f"{buffer} of the output", got=got, do="make it by quantizer.make_empty"))
        check_same_device(buffer_of_output, x, "output of quantize")
