"""Functions for the activations: ``y = f(x)``, gated ones ``[.., 2 H] -> [.., H]`` with ``y = f(first half) * second half``.

Each can write an 8-bit result directly. ``d*`` is the backward; ``dbias_d*`` gives the bias gradient, the sum of ``dx`` over rows, with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from fusible import tex
from fusible.nvte.casting import emit, emitter, plain, transpose
from fusible.nvte.dtype import DType, Type
from fusible.nvte.tensor import Tensor
from fusible.tex.activations import ACTIVATIONS


class Activation(Protocol):
    def __call__(self, x: Tensor, type: Type, *options: float) -> Tensor: ...


class ActivationBackward(Protocol):
    def __call__(self, dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor: ...


class ActivationBiasBackward(Protocol):
    def __call__(self, dy: Tensor, x: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor]: ...


class ScaledActivation(Protocol):
    def __call__(self, x: Tensor, scales: Tensor, type: Type, *options: float) -> Tensor: ...


class ScaledActivationBackward(Protocol):
    def __call__(
        self, dy: Tensor, x: Tensor, scales: Tensor, type: Type, *options: float, scales_gradient: bool = True
    ) -> tuple[Tensor, Tensor | None]: ...


def _shape_of_result(x: Tensor, narrower: int) -> tuple[int, ...]:
    """The shape of what an activation gives for ``x``."""
    return (*x.shape[:-1], x.shape[-1] // narrower)


def _pair(name: str, gradient_name: str, narrower: int) -> tuple[Activation, ActivationBackward]:
    kernel, gradient_kernel = getattr(tex, name), getattr(tex, gradient_name)

    def function(x: Tensor, type: Type, *options: float) -> Tensor:
        quantizer = emitter(type, _shape_of_result(x, narrower))
        return emit(kernel(x.data, quantizer, *options), type, quantizer)

    def gradient(dy: Tensor, x: Tensor, type: Type, *options: float) -> Tensor:
        quantizer = emitter(type, x.shape)
        return emit(gradient_kernel(dy.data, x.data, quantizer, *options), type, quantizer)

    function.__doc__ = f"``y = {name}(x)`` in ``type``, with the further options of ``tex.{name}``."
    gradient.__doc__ = f"``dx`` of ``{name}`` from ``dy`` and its input ``x``, in ``type`` (see ``tex.{gradient_name}``)."
    return function, gradient


def _scaled_pair(name: str, gradient_name: str, narrower: int) -> tuple[ScaledActivation, ScaledActivationBackward]:
    kernel, gradient_kernel = getattr(tex, name), getattr(tex, gradient_name)

    def function(x: Tensor, scales: Tensor, type: Type, *options: float) -> Tensor:
        quantizer = emitter(type, _shape_of_result(x, narrower))
        return emit(kernel(x.data, scales.data, quantizer, *options), type, quantizer)

    def gradient(dy: Tensor, x: Tensor, scales: Tensor, type: Type, *options: float, scales_gradient: bool = True) -> tuple[Tensor, Tensor | None]:
        quantizer = emitter(type, x.shape)
        dx, dscales = gradient_kernel(dy.data, x.data, scales.data, quantizer, *options, compute_scale_grad=scales_gradient)
        return emit(dx, type, quantizer), Tensor(dscales, scales.type) if scales_gradient else None

    function.__doc__ = f"``y = {name}(x) * scales`` in ``type``, a scale per row, with the further options of ``tex.{name}``."
    gradient.__doc__ = f"``(dx, dscales)`` of ``{name}`` (see ``tex.{gradient_name}``); None for the latter without ``scales_gradient``."
    return function, gradient


def _with_dbias(gradient_name: str) -> ActivationBiasBackward:
    kernel = getattr(tex, f"dbias_{gradient_name}")

    def function(dy: Tensor, x: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor]:
        quantizer = emitter(type, x.shape)
        sums, data = kernel(dy.data, x.data, quantizer)
        return emit(data, type, quantizer), plain(sums, dbias_type)

    function.__doc__ = f"``(dx, dbias)``: ``{gradient_name}`` and the sum of its result over rows (see ``tex.dbias_{gradient_name}``)."
    return function


def _functions() -> Iterator[tuple[str, Any]]:
    """The functions of every activation by their names, which are those of tex."""
    for row in ACTIVATIONS:
        names, narrower = (row.name, row.gradient), 2 if row.gated else 1
        yield from zip(names, _pair(*names, narrower), strict=True)
        if row.scaled:
            names = f"scaled_{row.name}", f"scaled_{row.gradient}"
            yield from zip(names, _scaled_pair(*names, narrower), strict=True)
        if not row.gated:
            yield f"dbias_{row.gradient}", _with_dbias(row.gradient)


_made = dict(_functions())
for _name, _word in _made.items():
    _word.__name__ = _word.__qualname__ = _name
globals().update(_made)


def cast_transpose_dbias_dgelu_checked(dy: Tensor, x: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor, Tensor]:
    """``(dx, dx transposed, dbias)`` of a GELU and the bias before it; ``dx [rows, columns]`` in ``type``."""
    dx, dbias = _made["dbias_dgelu"](dy, x, type, dbias_type)
    return dx, transpose(dx), dbias


def cast_transpose_dgeglu_checked(dy: Tensor, x: Tensor, type: Type) -> tuple[Tensor, Tensor]:
    """``(dx, dx transposed)`` of a GeGLU; ``dx [rows, 2 columns]`` in ``type``."""
    dx = _made["dgeglu"](dy, x, type)
    return dx, transpose(dx)


__all__ = sorted(["cast_transpose_dbias_dgelu_checked", "cast_transpose_dgeglu_checked", *_made])  # pyright: ignore[reportUnsupportedDunderAll]
