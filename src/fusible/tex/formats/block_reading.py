"""How a copy of a tensor of a block-scaled format is read, whatever the backend: what there is of it, in which order its scales lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.tex.formats.block_layout import check_scales, scale_shape, used_scales
from fusible.tex.formats.format import format_of, logical_shape
from fusible.tex.protocol import outer

__all__ = ["BlockReader", "WAYS", "by_columns"]

WAYS = ("rowwise", "columnwise")
"""The copies that a tensor may have."""


def by_columns(name: str, way: str) -> bool:
    """Whether the scales of a copy lie blocks first, and it is their transpose that is put in the order of a product."""
    return name == "mxfp8" and way == "columnwise"


@dataclass(frozen=True)
class BlockReader:
    """A backend's own part of reading: ``zeros(shape, data)``, ``unswizzle(scales, columnwise)``, the values of each format, and the matrix of a
    Hadamard transform that a copy has, or None."""

    zeros: Callable[..., Any]
    unswizzle: Callable[[Any, bool], Any]
    block: Callable[..., Any]
    mxfp8: Callable[..., Any]
    nvfp4: Callable[..., Any]
    transform_of: Callable[[Any, str], Any]

    def values(self, x: Any, way: str, undo: bool = True) -> tuple[Any, Any]:
        """The fp32 matrix ``[M, K]`` that a copy of ``x`` stands for, but for a factor, which is the second: None, fp32 ``[1]``, or one per line.

        A line is a row of the row-wise copy, a column of the column-wise one. ``undo`` takes back a Hadamard transform. Raises ``ArgumentError``
        where ``x`` lacks that copy.
        """
        name, data = format_of(x), getattr(x, f"_{way}_data")
        if data is None:
            got, do = f"only the {WAYS[way == 'rowwise']} one", "quantize it with that usage"
            raise ArgumentError(expected(f"a {way} copy", of=f"a tensor of {name}", got=got, do=do))
        full = logical_shape(x)
        shape = outer(full), full[-1]
        if 0 in data.shape:
            return self.zeros(shape, data), None
        if name == "block":
            used, whole = (f(name, shape, way == "columnwise", x._is_2D_scaled) for f in (used_scales, scale_shape))
            check_scales(getattr(x, f"_{way}_scale_inv"), used, whole, f"{way} scales of a tensor of {name} {list(shape)}")
            return self.block(x, way, shape), None
        scales = self._compact(x, name, way, shape)
        return (self.mxfp8(x, way, scales, shape), None) if name == "mxfp8" else self.nvfp4(x, way, scales, shape, undo)

    def _compact(self, x: Any, name: str, way: str, shape: tuple[int, int]) -> Any:
        """The scales of a copy in the order of its blocks, without padding."""
        scales = getattr(x, f"_{way}_scale_inv")
        lines, blocks = used_scales(name, shape, way == "columnwise", False)
        whole = scale_shape(name, shape, way == "columnwise", False)
        check_scales(scales, whole if x._with_gemm_swizzled_scales else (lines, blocks), whole, f"{way} scales of a tensor of {name} {list(shape)}")
        if x._with_gemm_swizzled_scales:
            scales = self.unswizzle(scales, by_columns(name, way))
        return scales[:lines, :blocks]

    def mixed_transform(self, a: Any, way_a: str, b: Any, way_b: str) -> bool:
        """Whether the Hadamard transforms of two operands fail to cancel in their product: one has one, and the other none."""
        transforms = [format_of(x) == "nvfp4" and self.transform_of(x, way) is not None for x, way in ((a, way_a), (b, way_b))]
        return transforms[0] != transforms[1]
