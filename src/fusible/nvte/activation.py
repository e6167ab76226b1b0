"""Words for the activations: ``y = f(x)``, gated ones ``[.., 2 H] -> [.., H]`` with ``y = f(first half) * second half``.

Each can write an 8-bit result directly. ``d*`` is the backward; ``dbias_d*`` gives the bias gradient, the sum of ``dx`` over rows, with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fusible import tex
from fusible.nvte.casting import emit, emitter, plain, transpose
from fusible.nvte.dtype import DType, Type
from fusible.nvte.tensor import Tensor

__all__ = [
    "cast_transpose_dbias_dgelu_checked",
    "cast_transpose_dgeglu_checked",
    "clamped_dswiglu",
    "clamped_swiglu",
    "dbias_dgelu",
    "dbias_dqgelu",
    "dbias_drelu",
    "dbias_dsilu",
    "dbias_dsrelu",
    "dgeglu",
    "dgelu",
    "dglu",
    "dqgeglu",
    "dqgelu",
    "dreglu",
    "drelu",
    "dsilu",
    "dsituglu",
    "dsreglu",
    "dsrelu",
    "dswiglu",
    "geglu",
    "gelu",
    "glu",
    "qgeglu",
    "qgelu",
    "reglu",
    "relu",
    "scaled_clamped_dswiglu",
    "scaled_clamped_swiglu",
    "scaled_dsituglu",
    "scaled_dsrelu",
    "scaled_dswiglu",
    "scaled_situglu",
    "scaled_srelu",
    "scaled_swiglu",
    "silu",
    "situglu",
    "sreglu",
    "srelu",
    "swiglu",
]


class Activation(Protocol):
    def __call__(self, x: Tensor, type: Type, *options: float) -> Tensor: ...


class ActivationBackward(Protocol):
    def __call__(self, dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor: ...


class ActivationBiasBackward(Protocol):
    def __call__(self, dy: Tensor, x: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor]: ...


def cast_transpose_dbias_dgelu_checked(dy: Tensor, x: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, dx transposed, dbias)`` of a GELU and the bias before it; ``dx [rows, columns]`` in ``type``."""
    dx, dbias = dbias_dgelu(dy, x, type, dbias_type)
    return dx, transpose(dx), dbias


def cast_transpose_dgeglu_checked(dy: Tensor, x: Tensor, type: Type) -> tuple[Tensor, Tensor]:
    """``(dx, dx transposed)`` of a GeGLU; ``dx [rows, 2 columns]`` in ``type``."""
    dx = dgeglu(dy, x, type)
    return dx, transpose(dx)


class ScaledActivation(Protocol):
    def __call__(self, x: Tensor, scales: Tensor, type: Type, *options: float) -> Tensor: ...


class ScaledActivationBackward(Protocol):
    def __call__(
        self, dy: Tensor, x: Tensor, scales: Tensor, type: Type, *options: float, scales_gradient: bool = True
    ) -> tuple[Tensor, Tensor | None]: ...


def _given(x: Tensor, narrower: int) -> tuple[int, ...]:
    """The shape of what an activation gives for ``x``."""
    return (*x.shape[:-1], x.shape[-1] // narrower)


def _pair(name: str, forward: Callable, backward: Callable) -> tuple[Activation, ActivationBackward]:
    narrower = 2 if name.endswith("glu") else 1

    def word(x: Tensor, type: Type, *options: float) -> Tensor:
        quantizer = emitter(type, _given(x, narrower))
        return emit(forward(x.data, quantizer, *options), type, quantizer)

    def dword(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
        quantizer = emitter(type, x.shape)
        return emit(backward(dy.data, x.data, quantizer, *options), type, quantizer)

    word.__name__, dword.__name__ = name, backward.__name__
    word.__doc__ = f"``y = {name}(x)`` in ``type``, with the further options of ``tex.{name}``."
    dword.__doc__ = f"``dx`` of ``{name}`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.{backward.__name__}``)."
    return word, dword


def _scaled_pair(name: str, forward: Callable, backward: Callable) -> tuple[ScaledActivation, ScaledActivationBackward]:
    narrower = 2 if name.endswith("glu") else 1

    def word(x: Tensor, scales: Tensor, type: Type, *options: float) -> Tensor:
        quantizer = emitter(type, _given(x, narrower))
        return emit(forward(x.data, scales.data, quantizer, *options), type, quantizer)

    def dword(dy: Tensor, x: Tensor, scales: Tensor, type: Type, *options: float, scales_gradient: bool = True) -> tuple[Tensor, Tensor | None]:
        quantizer = emitter(type, x.shape)
        dx, dscales = backward(dy.data, x.data, scales.data, quantizer, *options, compute_scale_grad=scales_gradient)
        return emit(dx, type, quantizer), Tensor(dscales, scales.type) if scales_gradient else None

    word.__name__, dword.__name__ = name, backward.__name__
    word.__doc__ = f"``y = {name}(x) * scales`` in ``type``, a scale per row, with the further options of ``tex.{name}``."
    dword.__doc__ = f"``(dx, dscales)`` of ``{name}`` (see ``tex.{backward.__name__}``); None for the latter without ``scales_gradient``."
    return word, dword


def _with_dbias(name: str, backward: Callable) -> ActivationBiasBackward:
    def word(dy: Tensor, x: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor]:
        quantizer = emitter(type, x.shape)
        sums, data = backward(dy.data, x.data, quantizer)
        return emit(data, type, quantizer), plain(sums, dbias_type)

    word.__name__ = f"dbias_{name}"
    word.__doc__ = f"``(dx, dbias)``: ``{name}`` and the sum of its result over rows (see ``tex.dbias_{name}``)."
    return word


gelu, dgelu = _pair("gelu", tex.gelu, tex.dgelu)
qgelu, dqgelu = _pair("qgelu", tex.qgelu, tex.dqgelu)
relu, drelu = _pair("relu", tex.relu, tex.drelu)
silu, dsilu = _pair("silu", tex.silu, tex.dsilu)
srelu, dsrelu = _pair("srelu", tex.srelu, tex.dsrelu)
glu, dglu = _pair("glu", tex.glu, tex.dglu)
geglu, dgeglu = _pair("geglu", tex.geglu, tex.dgeglu)
qgeglu, dqgeglu = _pair("qgeglu", tex.qgeglu, tex.dqgeglu)
reglu, dreglu = _pair("reglu", tex.reglu, tex.dreglu)
sreglu, dsreglu = _pair("sreglu", tex.sreglu, tex.dsreglu)
swiglu, dswiglu = _pair("swiglu", tex.swiglu, tex.dswiglu)
situglu, dsituglu = _pair("situglu", tex.situglu, tex.dsituglu)
clamped_swiglu, clamped_dswiglu = _pair("clamped_swiglu", tex.clamped_swiglu, tex.clamped_dswiglu)

scaled_srelu, scaled_dsrelu = _scaled_pair("scaled_srelu", tex.scaled_srelu, tex.scaled_dsrelu)
scaled_swiglu, scaled_dswiglu = _scaled_pair("scaled_swiglu", tex.scaled_swiglu, tex.scaled_dswiglu)
scaled_situglu, scaled_dsituglu = _scaled_pair("scaled_situglu", tex.scaled_situglu, tex.scaled_dsituglu)
scaled_clamped_swiglu, scaled_clamped_dswiglu = _scaled_pair("scaled_clamped_swiglu", tex.scaled_clamped_swiglu, tex.scaled_clamped_dswiglu)

dbias_dgelu = _with_dbias("dgelu", tex.dbias_dgelu)
dbias_dqgelu = _with_dbias("dqgelu", tex.dbias_dqgelu)
dbias_drelu = _with_dbias("drelu", tex.dbias_drelu)
dbias_dsilu = _with_dbias("dsilu", tex.dbias_dsilu)
dbias_dsrelu = _with_dbias("dsrelu", tex.dbias_dsrelu)
