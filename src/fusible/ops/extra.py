"""Tensors that join a pipeline on its way, or leave it: side values, whose names are given when the ops are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

from fusible import nvte
from fusible.errors import ShapeError, expected
from fusible.nvte import DType
from fusible.ops.op import Context, Op, OpTypes

__all__ = ["AddExtra", "MakeExtra"]


class MakeExtra(Op):
    """``y = x``, and ``x`` leaves as the side output ``name`` too; ``dx = dy`` + the gradient of that, if it has one.

    y is written in the 8-bit type that the next op asks for; what leaves stays as it came. Where nothing leaves, x may come in that type too.
    """

    rows_alone = True
    quantizes_y = True
    x_dtype = DType.BFloat16

    def __init__(self, name: str, **types: Unpack[OpTypes]) -> None:
        super().__init__(**types)
        self.side_outputs = (name,)

    @property
    def transparent(self) -> bool:
        return not self.side_outputs

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context, dict[str, nvte.Tensor]]:
        x = nvte.cast_checked(x, self.x_dtype)
        return nvte.cast_checked(x, self.y_dtype), {}, dict.fromkeys(self.side_outputs, x)

    def backward(self, ctx: Context, dy: nvte.Tensor, **sides: nvte.Tensor | None) -> tuple[nvte.Tensor | None, list[nvte.Tensor]]:
        dextra = self.dextra(sides)
        if not self.wants("x"):
            return None, []
        return nvte.cast_checked(dy, self.dx_dtype) if dextra is None else nvte.add(dy, dextra, self.dx_dtype), []

    def dextra(self, sides: Mapping[str, nvte.Tensor | None]) -> nvte.Tensor | None:
        """The gradient of the side output; where it goes by several names, their sum."""
        total: nvte.Tensor | None = None
        for name in self.side_outputs:
            grad = sides[name]
            if grad is not None:
                total = grad if total is None else nvte.add(total, grad, nvte.element(total.type))
        return total

    def extra_repr(self) -> str:
        return ", ".join(self.side_outputs)


class AddExtra(Op):
    """``y = x`` + the side input ``name``, of the same shape; the gradient of both is ``dy``."""

    rows_alone = True
    dy_dtype = DType.BFloat16

    def __init__(self, name: str, **types: Unpack[OpTypes]) -> None:
        super().__init__(**types)
        self.side_inputs = (name,)

    @property
    def name(self) -> str:
        return self.side_inputs[0]

    def forward(self, x: nvte.Tensor, **sides: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        x = nvte.cast_checked(x, self.x_dtype)
        return nvte.add(x, self.extra(sides, x.shape), self.y_dtype), {}

    def extra(self, sides: Mapping[str, nvte.Tensor], shape: Sequence[int]) -> nvte.Tensor:
        """The side input, unquantized. Raises ``ShapeError`` unless it has the ``shape`` of x."""
        extra = sides[self.name]
        if extra.shape != tuple(shape):
            raise ShapeError(expected(f"shape {list(shape)}", of=f"the side input of {self!r}", got=list(extra.shape), do="give x's shape"))
        return nvte.dequantize(extra, DType.Float32) if nvte.is_quantized_type(extra.type) else extra

    def backward(self, ctx: Context, dy: nvte.Tensor) -> tuple[nvte.Tensor, list[nvte.Tensor], dict[str, nvte.Tensor | None]]:
        dy = nvte.cast_checked(dy, self.dy_dtype)
        return nvte.cast_checked(dy, self.dx_dtype), [], {self.name: dy if self.wants(self.name) else None}

    def extra_repr(self) -> str:
        return self.name
