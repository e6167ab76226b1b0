"""How a copy of a tensor of a block-scaled format is read, whatever the backend: what there is of it, in which order its scales lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fusible.errors import ArgumentError, NotServedError, expected
from fusible.tex.enums import DType
from fusible.tex.formats.blocks import WAYS, BlockCodec, BlockFormat, check_scales
from fusible.tex.formats.format import format_of
from fusible.tex.protocol import outer

__all__ = ["BlockReader", "Codes"]


class Codes(NamedTuple):
    """The codes of a copy whose lines are contracted, as they are stored, a matrix: transposed, where ``turned``; their type; their scales, and
    whether these are of squares; the factor of all, a number or a tensor of one."""

    data: Any
    turned: bool
    dtype: DType
    scales: Any
    tiled: bool
    factor: Any


@dataclass(frozen=True)
class BlockReader:
    """A framework's own part of reading: its name in ``BlockFormat.codecs``, ``zeros(shape, data)`` and ``unswizzle(scales, columnwise)``."""

    framework: str
    zeros: Callable[..., Any]
    unswizzle: Callable[[Any, bool], Any]

    def codec(self, form: BlockFormat) -> BlockCodec:
        """What encodes and decodes ``form`` here. Raises ``NotServedError`` where its package brings nothing for this framework."""
        found = form.codecs.get(self.framework)
        if found is None:
            got, do = ", ".join(form.codecs) or "none", f"set {form}.codecs[{self.framework!r}]"
            raise NotServedError(expected(f"a codec for {self.framework!r}", of=f"the format {form}", got=got, do=do))
        return found

    def register(self, codecs: Mapping[BlockFormat, BlockCodec]) -> None:
        """Let the formats be encoded and decoded here by ``codecs``."""
        for form, codec in codecs.items():
            form.codecs[self.framework] = codec

    def values(self, x: Any, way: str, undo: bool = True) -> tuple[Any, Any]:
        """The fp32 matrix ``[M, K]`` that a copy of ``x`` stands for, but for a factor, which is the second: None, fp32 ``[1]``, or one per line.

        A line is a row of the row-wise copy, a column of the column-wise one. ``undo`` takes back a Hadamard transform. Raises ``ArgumentError``
        where ``x`` lacks that copy.
        """
        form, data, shape = self.stored(x, way)
        if 0 in data.shape:
            return self.zeros(shape, data), None
        return self.codec(form).decode(x, way, self.scales_of(form, shape, x, way), shape, undo)

    def stored(self, x: Any, way: str) -> tuple[BlockFormat, Any, tuple[int, int]]:
        """The format of ``x``, the data of a copy as they are stored, and the shape of the matrix that they stand for."""
        form, data = format_of(x), getattr(x, f"_{way}_data")
        assert isinstance(form, BlockFormat)
        if data is None:
            got, do = f"only the {WAYS[way == 'rowwise']} one", "quantize it with that usage"
            raise ArgumentError(expected(f"a {way} copy", of=f"a tensor of {form}", got=got, do=do))
        full = form.shape(x)
        return form, data, (outer(full), full[-1])

    def scales(self, x: Any, way: str) -> Any:
        """The scales of a copy in the order of its blocks, without padding."""
        form, _, shape = self.stored(x, way)
        return self.scales_of(form, shape, x, way)

    def scales_of(self, form: BlockFormat, shape: tuple[int, int], x: Any, way: str) -> Any:
        """``scales``, where ``stored`` has told the format of ``x`` and the shape of its matrix."""
        scales: Any = getattr(x, f"_{way}_scale_inv")
        columnwise, tiled, swizzled = way == "columnwise", form.has_tile_scales(x), form.is_swizzled(x)
        used = form.used_scales(shape, columnwise, tiled)
        if not swizzled and tuple(getattr(scales, "shape", ())) == used:
            return scales
        whole = form.scale_shape(shape, columnwise, tiled)
        check_scales(scales, whole if swizzled else used, whole, f"{way} scales of a tensor of {form} {list(shape)}")
        if swizzled:
            scales = self.unswizzle(scales, columnwise and form.blocks_first)
        return scales[: used[0], : used[1]]

    def transform(self, x: Any, way: str) -> Any:
        """The matrix by which the lines of a copy of ``x`` were multiplied in groups, or None."""
        form = format_of(x)
        return self.codec(form).transform(x, way) if isinstance(form, BlockFormat) else None

    def mixed_transform(self, a: Any, way_a: str, b: Any, way_b: str) -> bool:
        """Whether the transforms of two operands fail to cancel in their product: one has one, and the other none."""
        return (self.transform(a, way_a) is not None) != (self.transform(b, way_b) is not None)
