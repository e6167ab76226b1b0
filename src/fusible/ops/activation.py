"""The activations. Gated ones take ``[tokens, 2 H]`` and give ``[tokens, H]``: the first half activated, times the second."""

from __future__ import annotations

from typing import ClassVar

from fusible import nvte
from fusible.errors import ShapeError, expected
from fusible.nvte import DType
from fusible.nvte.activation import Activation as ActivationWord
from fusible.nvte.activation import ActivationBackward
from fusible.ops.op import Context, Op

__all__ = ["Activation", "GELU", "GLU", "GeGLU", "QGELU", "QGeGLU", "ReGLU", "ReLU", "SReGLU", "SReLU", "SiLU", "SwiGLU"]


class Activation(Op):
    """An activation: a subclass names its word and the word's backward (wrapped in ``staticmethod``)."""

    word: ClassVar[ActivationWord]
    dword: ClassVar[ActivationBackward]
    gated: ClassVar[bool] = False
    quantizes_y = True
    quantizes_dx = True

    def __init__(
        self,
        *,
        x_dtype: nvte.Type | None = DType.BFloat16,
        dy_dtype: nvte.Type | None = DType.BFloat16,
        y_dtype: nvte.Type = DType.Float8E4M3,
        dx_dtype: nvte.Type = DType.Float8E5M2,
    ) -> None:
        self.x_dtype = x_dtype
        self.dy_dtype = dy_dtype
        self.y_dtype = y_dtype
        self.dx_dtype = dx_dtype

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        x = nvte.cast_checked(x, self.x_dtype)
        return self.word(x, self.y_dtype), {"x": x}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> tuple[nvte.Tensor, list[nvte.Tensor]]:
        dy = nvte.cast_checked(dy, self.dy_dtype)
        return self.dword(dy, ctx["x"], self.dx_dtype), []

    def width(self, width: int) -> int:
        if self.gated and width % 2:
            raise ShapeError(
                expected("an even number of columns", of=f"the input of {self!r}", got=f"{width}", do="give two halves, the gate first")
            )
        return width // 2 if self.gated else width


class GELU(Activation):
    """``x * Phi(x)``, Phi by the tanh approximation (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""

    word = staticmethod(nvte.gelu)
    dword = staticmethod(nvte.dgelu)


class QGELU(Activation):
    """``x * sigmoid(1.702 x)``."""

    word = staticmethod(nvte.qgelu)
    dword = staticmethod(nvte.dqgelu)


class ReLU(Activation):
    """``max(x, 0)``."""

    word = staticmethod(nvte.relu)
    dword = staticmethod(nvte.drelu)


class SiLU(Activation):
    """``x * sigmoid(x)``."""

    word = staticmethod(nvte.silu)
    dword = staticmethod(nvte.dsilu)


class SReLU(Activation):
    """``max(x, 0)^2`` (So et al. 2021, arXiv:2109.08668)."""

    word = staticmethod(nvte.srelu)
    dword = staticmethod(nvte.dsrelu)


class GLU(Activation):
    """``sigmoid(a) * b`` (Dauphin et al. 2016, arXiv:1612.08083)."""

    word = staticmethod(nvte.glu)
    dword = staticmethod(nvte.dglu)
    gated = True


class GeGLU(Activation):
    """``gelu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""

    word = staticmethod(nvte.geglu)
    dword = staticmethod(nvte.dgeglu)
    gated = True


class QGeGLU(Activation):
    """``qgelu(a) * b``."""

    word = staticmethod(nvte.qgeglu)
    dword = staticmethod(nvte.dqgeglu)
    gated = True


class ReGLU(Activation):
    """``relu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""

    word = staticmethod(nvte.reglu)
    dword = staticmethod(nvte.dreglu)
    gated = True


class SReGLU(Activation):
    """``srelu(a) * b``."""

    word = staticmethod(nvte.sreglu)
    dword = staticmethod(nvte.dsreglu)
    gated = True


class SwiGLU(Activation):
    """``silu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""

    word = staticmethod(nvte.swiglu)
    dword = staticmethod(nvte.dswiglu)
    gated = True
