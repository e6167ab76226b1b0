"""SwiGLU and its kin: gates whose two halves may lie in blocks by turns."""

from __future__ import annotations

import math
from typing import Unpack

from fusible import nvte
from fusible.errors import ArgumentError, check_number, expected
from fusible.ops.activation_base import Activation, half_width
from fusible.ops.op import Op, OpTypes

__all__ = ["ClampedSwiGLU", "SiTUGLU", "SwiGLU"]


class _BlockGate(Activation):
    """``glu_interleave_size`` n: the halves alternate in blocks of n columns, ``[a0 b0 a1 b1 ..]``, in x and in dx. None: they lie side by side."""

    gated = True

    def __init__(self, *, glu_interleave_size: int | None = None, cache_quantized_input: bool = False, **types: Unpack[OpTypes]) -> None:
        super().__init__(cache_quantized_input=cache_quantized_input, **types)
        self.glu_interleave_size = check_interleave(self, glu_interleave_size)

    @property
    def options(self) -> tuple[float, ...]:
        """What the words take beside tensors and the type."""
        return ()

    def activate(self, x: nvte.Tensor) -> nvte.Tensor:
        size = self.glu_interleave_size
        return self.word(x if size is None else nvte.deinterleave(x, size), self.y_dtype, *self.options)

    def differentiate(self, dy: nvte.Tensor, x: nvte.Tensor) -> nvte.Tensor:
        size = self.glu_interleave_size
        if size is None:
            return self.dword(dy, x, self.dx_dtype, *self.options)
        dx = self.dword(dy, nvte.deinterleave(x, size), x.dtype, *self.options)
        return nvte.cast_checked(nvte.interleave(dx, size), self.dx_dtype)

    def width(self, width: int | None) -> int | None:
        return half_width(self, width, self.glu_interleave_size or 1)

    def extra_repr(self) -> str:
        return "" if self.glu_interleave_size is None else f"glu_interleave_size={self.glu_interleave_size}"


class SwiGLU(_BlockGate):
    """``silu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""

    word = staticmethod(nvte.swiglu)
    dword = staticmethod(nvte.dswiglu)


class SiTUGLU(_BlockGate):
    """``beta1 tanh(a / beta1) sigmoid(a) * beta2 tanh(b / beta2)``: SwiGLU whose two factors saturate."""

    word = staticmethod(nvte.situglu)
    dword = staticmethod(nvte.dsituglu)

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        glu_interleave_size: int | None = None,
        cache_quantized_input: bool = False,
        **types: Unpack[OpTypes],
    ) -> None:
        super().__init__(glu_interleave_size=glu_interleave_size, cache_quantized_input=cache_quantized_input, **types)
        self.beta1, self.beta2 = check_positive(self, "beta1", beta1), check_positive(self, "beta2", beta2)

    @property
    def options(self) -> tuple[float, ...]:
        return self.beta1, self.beta2


class ClampedSwiGLU(_BlockGate):
    """``c sigmoid(alpha c) * (clamp(b, -limit, limit) + glu_linear_offset)`` with ``c = min(a, limit)``: the gate of gpt-oss."""

    word = staticmethod(nvte.clamped_swiglu)
    dword = staticmethod(nvte.clamped_dswiglu)

    def __init__(
        self,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        glu_interleave_size: int | None = None,
        cache_quantized_input: bool = False,
        **types: Unpack[OpTypes],
    ) -> None:
        super().__init__(glu_interleave_size=glu_interleave_size, cache_quantized_input=cache_quantized_input, **types)
        for name, value in (("alpha", alpha), ("glu_linear_offset", glu_linear_offset)):
            check_number(value, f"{name} of {type(self).__name__}")
        if not limit >= 0:
            raise ArgumentError(expected("a number of at least 0", of=f"limit of {type(self).__name__}", got=limit, do="pass such a number"))
        self.limit, self.alpha, self.glu_linear_offset = limit, alpha, glu_linear_offset

    @property
    def options(self) -> tuple[float, ...]:
        return self.limit, self.alpha, self.glu_linear_offset


def check_interleave(op: Op, size: int | None) -> int | None:
    """``size``. Raises ``ArgumentError`` unless it is None or a number of columns."""
    if size is not None and size < 1:
        of = f"glu_interleave_size of {type(op).__name__}"
        raise ArgumentError(expected("a positive number of columns, or None", of=of, got=size, do="give the length of a block"))
    return size


def check_positive(op: Op, name: str, value: float) -> float:
    """``value``. Raises ``ArgumentError`` unless it is a positive number."""
    if not 0 < value < math.inf:
        raise ArgumentError(expected("a positive number", of=f"{name} of {type(op).__name__}", got=value, do="give where the factor saturates"))
    return float(value)
