# ruff: noqa: E501, I001
# Written by `make stub` of the module beside it, which makes names of the rows of fusible.tex.activations.

from typing import Protocol
from fusible.nvte.dtype import DType
from fusible.nvte.dtype import Type
from fusible.nvte.tensor import Tensor

class Activation(Protocol):

    def __call__(self, x: Tensor, type: Type, *options: float) -> Tensor:
        ...

class ActivationBackward(Protocol):

    def __call__(self, dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
        ...

class ActivationBiasBackward(Protocol):

    def __call__(self, dy: Tensor, x: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor]:
        ...

class ScaledActivation(Protocol):

    def __call__(self, x: Tensor, scales: Tensor, type: Type, *options: float) -> Tensor:
        ...

class ScaledActivationBackward(Protocol):

    def __call__(self, dy: Tensor, x: Tensor, scales: Tensor, type: Type, *options: float, scales_gradient: bool=True) -> tuple[Tensor, Tensor | None]:
        ...

def cast_transpose_dbias_dgelu_checked(dy: Tensor, x: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, dx transposed, dbias)`` of a GELU and the bias before it; ``dx [rows, columns]`` in ``type``."""

def cast_transpose_dgeglu_checked(dy: Tensor, x: Tensor, type: Type) -> tuple[Tensor, Tensor]:
    """``(dx, dx transposed)`` of a GeGLU; ``dx [rows, 2 columns]`` in ``type``."""

def clamped_dswiglu(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
    """``dx`` of ``clamped_swiglu`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.clamped_dswiglu``)."""

def clamped_swiglu(x: Tensor, type: Type, *options: float) -> Tensor:
    """``y = clamped_swiglu(x)`` in ``type``, with the further options of ``tex.clamped_swiglu``."""

def dbias_dgelu(dy: Tensor, x: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor]:
    """``(dx, dbias)``: ``dgelu`` and the sum of its result over rows (see ``tex.dbias_dgelu``)."""

def dbias_dqgelu(dy: Tensor, x: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor]:
    """``(dx, dbias)``: ``dqgelu`` and the sum of its result over rows (see ``tex.dbias_dqgelu``)."""

def dbias_drelu(dy: Tensor, x: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor]:
    """``(dx, dbias)``: ``drelu`` and the sum of its result over rows (see ``tex.dbias_drelu``)."""

def dbias_dsilu(dy: Tensor, x: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor]:
    """``(dx, dbias)``: ``dsilu`` and the sum of its result over rows (see ``tex.dbias_dsilu``)."""

def dbias_dsrelu(dy: Tensor, x: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor]:
    """``(dx, dbias)``: ``dsrelu`` and the sum of its result over rows (see ``tex.dbias_dsrelu``)."""

def dbias_erf_dgelu(dy: Tensor, x: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor]:
    """``(dx, dbias)``: ``erf_dgelu`` and the sum of its result over rows (see ``tex.dbias_erf_dgelu``)."""

def dgeglu(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
    """``dx`` of ``geglu`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.dgeglu``)."""

def dgelu(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
    """``dx`` of ``gelu`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.dgelu``)."""

def dglu(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
    """``dx`` of ``glu`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.dglu``)."""

def dqgeglu(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
    """``dx`` of ``qgeglu`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.dqgeglu``)."""

def dqgelu(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
    """``dx`` of ``qgelu`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.dqgelu``)."""

def dreglu(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
    """``dx`` of ``reglu`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.dreglu``)."""

def drelu(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
    """``dx`` of ``relu`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.drelu``)."""

def dsilu(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
    """``dx`` of ``silu`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.dsilu``)."""

def dsituglu(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
    """``dx`` of ``situglu`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.dsituglu``)."""

def dsreglu(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
    """``dx`` of ``sreglu`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.dsreglu``)."""

def dsrelu(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
    """``dx`` of ``srelu`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.dsrelu``)."""

def dswiglu(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
    """``dx`` of ``swiglu`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.dswiglu``)."""

def erf_dgeglu(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
    """``dx`` of ``erf_geglu`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.erf_dgeglu``)."""

def erf_dgelu(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
    """``dx`` of ``erf_gelu`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.erf_dgelu``)."""

def erf_geglu(x: Tensor, type: Type, *options: float) -> Tensor:
    """``y = erf_geglu(x)`` in ``type``, with the further options of ``tex.erf_geglu``."""

def erf_gelu(x: Tensor, type: Type, *options: float) -> Tensor:
    """``y = erf_gelu(x)`` in ``type``, with the further options of ``tex.erf_gelu``."""

def geglu(x: Tensor, type: Type, *options: float) -> Tensor:
    """``y = geglu(x)`` in ``type``, with the further options of ``tex.geglu``."""

def gelu(x: Tensor, type: Type, *options: float) -> Tensor:
    """``y = gelu(x)`` in ``type``, with the further options of ``tex.gelu``."""

def glu(x: Tensor, type: Type, *options: float) -> Tensor:
    """``y = glu(x)`` in ``type``, with the further options of ``tex.glu``."""

def qgeglu(x: Tensor, type: Type, *options: float) -> Tensor:
    """``y = qgeglu(x)`` in ``type``, with the further options of ``tex.qgeglu``."""

def qgelu(x: Tensor, type: Type, *options: float) -> Tensor:
    """``y = qgelu(x)`` in ``type``, with the further options of ``tex.qgelu``."""

def reglu(x: Tensor, type: Type, *options: float) -> Tensor:
    """``y = reglu(x)`` in ``type``, with the further options of ``tex.reglu``."""

def relu(x: Tensor, type: Type, *options: float) -> Tensor:
    """``y = relu(x)`` in ``type``, with the further options of ``tex.relu``."""

def scaled_clamped_dswiglu(
    dy: Tensor, x: Tensor, scales: Tensor, type: Type, *options: float, scales_gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """``(dx, dscales)`` of ``scaled_clamped_swiglu`` (see ``tex.scaled_clamped_dswiglu``); None for the latter without ``scales_gradient``."""

def scaled_clamped_swiglu(x: Tensor, scales: Tensor, type: Type, *options: float) -> Tensor:
    """``y = scaled_clamped_swiglu(x) * scales`` in ``type``, a scale per row, with the further options of ``tex.scaled_clamped_swiglu``."""

def scaled_dsituglu(
    dy: Tensor, x: Tensor, scales: Tensor, type: Type, *options: float, scales_gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """``(dx, dscales)`` of ``scaled_situglu`` (see ``tex.scaled_dsituglu``); None for the latter without ``scales_gradient``."""

def scaled_dsrelu(
    dy: Tensor, x: Tensor, scales: Tensor, type: Type, *options: float, scales_gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """``(dx, dscales)`` of ``scaled_srelu`` (see ``tex.scaled_dsrelu``); None for the latter without ``scales_gradient``."""

def scaled_dswiglu(
    dy: Tensor, x: Tensor, scales: Tensor, type: Type, *options: float, scales_gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """``(dx, dscales)`` of ``scaled_swiglu`` (see ``tex.scaled_dswiglu``); None for the latter without ``scales_gradient``."""

def scaled_situglu(x: Tensor, scales: Tensor, type: Type, *options: float) -> Tensor:
    """``y = scaled_situglu(x) * scales`` in ``type``, a scale per row, with the further options of ``tex.scaled_situglu``."""

def scaled_srelu(x: Tensor, scales: Tensor, type: Type, *options: float) -> Tensor:
    """``y = scaled_srelu(x) * scales`` in ``type``, a scale per row, with the further options of ``tex.scaled_srelu``."""

def scaled_swiglu(x: Tensor, scales: Tensor, type: Type, *options: float) -> Tensor:
    """``y = scaled_swiglu(x) * scales`` in ``type``, a scale per row, with the further options of ``tex.scaled_swiglu``."""

def silu(x: Tensor, type: Type, *options: float) -> Tensor:
    """``y = silu(x)`` in ``type``, with the further options of ``tex.silu``."""

def situglu(x: Tensor, type: Type, *options: float) -> Tensor:
    """``y = situglu(x)`` in ``type``, with the further options of ``tex.situglu``."""

def sreglu(x: Tensor, type: Type, *options: float) -> Tensor:
    """``y = sreglu(x)`` in ``type``, with the further options of ``tex.sreglu``."""

def srelu(x: Tensor, type: Type, *options: float) -> Tensor:
    """``y = srelu(x)`` in ``type``, with the further options of ``tex.srelu``."""

def swiglu(x: Tensor, type: Type, *options: float) -> Tensor:
    """``y = swiglu(x)`` in ``type``, with the further options of ``tex.swiglu``."""
