"""What an activation is as an op: it keeps its input."""

from __future__ import annotations

from typing import ClassVar, Unpack

from fusible import nvte
from fusible.errors import ShapeError, expected
from fusible.nvte import DType
from fusible.nvte.activation import Activation as ActivationWord
from fusible.nvte.activation import ActivationBackward
from fusible.ops.op import Context, Op, OpTypes

__all__ = ["Activation", "half_width"]


class Activation(Op):
    """An activation: a subclass names its word and the word's backward (wrapped in ``staticmethod``).

    ``cache_quantized_input``: what backward needs of x is kept in E4M3, scaled by its own amax: a byte per element, and a less exact gradient.
    """

    word: ClassVar[ActivationWord]
    dword: ClassVar[ActivationBackward]
    gated: ClassVar[bool] = False
    quantizes_y = True
    quantizes_dx = True
    x_dtype = DType.BFloat16
    dy_dtype = DType.BFloat16
    y_dtype = DType.Float8E4M3
    dx_dtype = DType.Float8E5M2

    def __init__(self, *, cache_quantized_input: bool = False, **types: Unpack[OpTypes]) -> None:
        super().__init__(**types)
        self.cache_quantized_input = cache_quantized_input

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        x = nvte.cast_checked(x, self.x_dtype)
        return self.activate(x), self.context(x)

    def inference(self, x: nvte.Tensor) -> nvte.Tensor:
        return self.activate(nvte.cast_checked(x, self.x_dtype))

    def backward(self, ctx: Context, dy: nvte.Tensor) -> tuple[nvte.Tensor, list[nvte.Tensor]]:
        dy = nvte.cast_checked(dy, self.dy_dtype)
        return self.differentiate(dy, self.saved(ctx)), []

    def activate(self, x: nvte.Tensor) -> nvte.Tensor:
        """``y``, of an x in its type."""
        return self.word(x, self.y_dtype)

    def differentiate(self, dy: nvte.Tensor, x: nvte.Tensor) -> nvte.Tensor:
        """``dx``, of dy and x in their types."""
        return self.dword(dy, x, self.dx_dtype)

    def context(self, x: nvte.Tensor) -> Context:
        """What backward needs of x."""
        return {"x": nvte.cast_checked(x, DType.Float8E4M3) if self.cache_quantized_input else x}

    def saved(self, ctx: Context) -> nvte.Tensor:
        """The x of ``context``, in its type; in fp32 where the op takes any and it was kept in 8 bits."""
        if not self.cache_quantized_input:
            return ctx["x"]
        return nvte.dequantize(ctx["x"], DType.Float32 if self.x_dtype is None else nvte.element(self.x_dtype))

    def width(self, width: int | None) -> int | None:
        return half_width(self, width) if self.gated else width


def half_width(op: Op, width: int | None, block: int = 1) -> int | None:
    """Half of ``width``. Raises ``ShapeError`` where it is no two halves of whole blocks of ``block`` columns."""
    if width is None:
        return None
    if width % (2 * block):
        number = "an even number of" if block == 1 else f"a multiple of {2 * block}"
        raise ShapeError(expected(f"{number} columns", of=f"the input of {op!r}", got=f"{width}", do="give two halves, the gate first"))
    return width // 2
