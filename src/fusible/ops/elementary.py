"""Ops without parameters that do little: ``ConstantScale``, ``Identity``, ``Quantize``, ``Reshape``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

from fusible import nvte
from fusible.errors import ArgumentError, ShapeError, check_number, expected
from fusible.nvte import DType
from fusible.ops.op import Context, Op, OpTypes
from fusible.ops.sharing import SharesColumns

__all__ = ["ConstantScale", "Identity", "Quantize", "Reshape"]


class ConstantScale(SharesColumns, Op):
    """``y = scale * x``; ``dx = scale * dy``. Each in fp32 with one rounding.

    A power of two may come quantized and go quantized: its elements are those of the product, and their scales are multiplied.
    """

    rows_alone = True

    def __init__(self, scale: float, **types: Unpack[OpTypes]) -> None:
        super().__init__(**types)
        check_number(scale, f"scale of {type(self).__name__}")
        self.scale = float(scale)
        self.exponent = nvte.exponent_of(self.scale)

    @property
    def transparent(self) -> bool:
        return self.exponent is not None

    def passes(self, type: nvte.Type) -> bool:
        return nvte.is_rescalable(type)

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        return self._scaled(nvte.cast_checked(x, self.x_dtype), self.y_dtype), {}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> tuple[nvte.Tensor, list[nvte.Tensor]]:
        return self._scaled(nvte.cast_checked(dy, self.dy_dtype), self.dx_dtype), []

    def _scaled(self, x: nvte.Tensor, type: nvte.Type) -> nvte.Tensor:
        if self.exponent is not None and x.type == type and self.passes(type):
            return nvte.rescale(x, self.exponent)
        return nvte.scale(x, self.scale, type)

    def extra_repr(self) -> str:
        return f"{self.scale:g}"


class Identity(SharesColumns, Op):
    """``y = x``; ``dx = dy``."""

    rows_alone = True

    @property
    def transparent(self) -> bool:
        return True

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        return nvte.cast_checked(nvte.cast_checked(x, self.x_dtype), self.y_dtype), {}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> tuple[nvte.Tensor, list[nvte.Tensor]]:
        return nvte.cast_checked(nvte.cast_checked(dy, self.dy_dtype), self.dx_dtype), []


class Quantize(Identity):
    """``y`` = x in 8 bits where ``forward``, ``dx`` = dy in 8 bits where ``backward``, in the type that the plan finds for them; else unchanged."""

    def __init__(self, forward: bool = True, backward: bool = False, **types: Unpack[OpTypes]) -> None:
        asked = OpTypes()
        if forward:
            asked["x_dtype"] = asked["y_dtype"] = DType.Float8E4M3
        if backward:
            asked["dy_dtype"] = asked["dx_dtype"] = DType.Float8E5M2
        super().__init__(**{**asked, **types})
        self.quantizes = forward, backward

    def extra_repr(self) -> str:
        return "forward={}, backward={}".format(*self.quantizes)


class Reshape(Op):
    """``y`` = x in ``shape``, of which one entry may be -1: as long as it takes; ``dx`` = dy in the shape of x.

    Where the rows stay as long as they are, a quantized x stays quantized: a scale belongs to a whole tensor or to blocks of its rows.
    """

    x_dtype = DType.BFloat16
    dy_dtype = DType.BFloat16

    def __init__(self, shape: Sequence[int], **types: Unpack[OpTypes]) -> None:
        super().__init__(**types)
        shape = tuple(shape)
        if not shape or min(shape) < -1 or shape.count(-1) > (0 not in shape):
            do = "name a shape that leaves one size open at most"
            raise ArgumentError(expected("sizes, at most one of them -1, and none beside a 0", of="the shape of Reshape", got=list(shape), do=do))
        self.shape = shape

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        x = nvte.cast_checked(x, self.x_dtype)
        known, elements, is_open = math.prod(size for size in self.shape if size >= 0), math.prod(x.shape), -1 in self.shape
        if elements % known if is_open else elements != known:
            wanted, of = f"{'a multiple of ' if is_open else ''}{known} elements", f"the input of {self!r}"
            raise ShapeError(expected(wanted, of=of, got=f"shape {list(x.shape)}", do="give a tensor that fits the shape"))
        return nvte.cast_checked(nvte.reshape(x, self.shape), self.y_dtype), self.context(x)

    def context(self, x: nvte.Tensor) -> Context:
        # A context holds tensors: one without elements keeps a shape and no memory.
        return {"shape": nvte.empty((*x.shape, 0), self.activation, x)}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> tuple[nvte.Tensor, list[nvte.Tensor]]:
        dy = nvte.cast_checked(dy, self.dy_dtype)
        return nvte.cast_checked(nvte.reshape(dy, ctx["shape"].shape[:-1]), self.dx_dtype), []

    @property
    def transparent(self) -> bool:
        return self.shape[-1] == self.x_width

    def width(self, width: int | None) -> int | None:
        return self.shape[-1] if self.shape[-1] >= 0 else None

    def extra_repr(self) -> str:
        return f"{list(self.shape)}"
