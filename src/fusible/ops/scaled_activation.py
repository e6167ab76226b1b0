"""Activations times a scale per row, which comes as a side input: what weighs the experts of a mixture between their two linear layers."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack

from fusible import nvte
from fusible.nvte import DType
from fusible.nvte.activation import ScaledActivation as ScaledForward
from fusible.nvte.activation import ScaledActivationBackward as ScaledBackward
from fusible.ops.activation_base import check_interleave, half_width, take_options
from fusible.ops.op import Context, Op, OpTypes
from fusible.tex.activations import Option

__all__ = ["ScaledActivation", "ScaledGate"]


class ScaledActivation(Op):
    """``y = activation(x) * s`` with ``s [rows]``, the side input named ``scales``; one rounding, after the product.

    ``ds`` is each row's sum of ``dy * activation(x)``, in the type of ``s``.
    """

    function: ClassVar[ScaledForward]
    gradient: ClassVar[ScaledBackward]
    quantizes_y = True
    quantizes_dx = True
    x_dtype = DType.BFloat16
    dy_dtype = DType.BFloat16
    y_dtype = DType.Float8E4M3
    dx_dtype = DType.Float8E5M2

    def __init__(self, scales: str, **types: Unpack[OpTypes]) -> None:
        super().__init__(**types)
        self.side_inputs = (scales,)

    @property
    def scales(self) -> str:
        return self.side_inputs[0]

    @property
    def options(self) -> tuple[float, ...]:
        """The arguments of the functions after the tensors and the type."""
        return ()

    def forward(self, x: nvte.Tensor, **sides: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        x, scales = nvte.cast_checked(x, self.x_dtype), sides[self.scales]
        return self.function(x, scales, self.y_dtype, *self.options), self.context(x, scales)

    def context(self, x: nvte.Tensor, scales: nvte.Tensor) -> Context:
        return {"x": x, "scales": scales}

    def backward(self, ctx: Context, dy: nvte.Tensor, **sides: nvte.Tensor) -> tuple[nvte.Tensor, list[nvte.Tensor], dict[str, nvte.Tensor | None]]:
        dy, wanted = nvte.cast_checked(dy, self.dy_dtype), self.wants(self.scales)
        dx, dscales = self.gradient(dy, ctx["x"], ctx["scales"], self.dx_dtype, *self.options, scales_gradient=wanted)
        return dx, [], {self.scales: dscales}

    def extra_repr(self) -> str:
        return self.scales


class ScaledGate(ScaledActivation):
    """``glu_interleave_size``: as in ``SwiGLU``."""

    takes: ClassVar[tuple[Option, ...]] = ()
    numbers: tuple[float, ...] = ()
    """The values of ``takes``."""

    def __init__(self, scales: str, *, glu_interleave_size: int | None = None, **types: Any) -> None:
        types = take_options(self, self.takes, types)
        super().__init__(scales, **types)
        self.glu_interleave_size = check_interleave(self, glu_interleave_size)

    @property
    def options(self) -> tuple[float, ...]:
        return *self.numbers, self.glu_interleave_size or 0

    def width(self, width: int | None) -> int | None:
        return half_width(self, width, self.glu_interleave_size or 1)
