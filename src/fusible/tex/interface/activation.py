"""Activations: pointwise and gated, forward and backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any

from fusible.tex.activations import ACTIVATIONS, Option
from fusible.tex.interface.arguments import Quantizer, Tensor
from fusible.tex.interface.declare import function
from fusible.tex.interface.domains import Size

__all__ = ["Activation"]


class Activation:
    """``out = f(x)``, computed in fp32 and rounded once to ``input``'s dtype, or quantized where a quantizer is given.

    The gated ones take ``[*leading, 2H]`` and give ``[*leading, H]``: with ``a`` the first half and ``b`` the second, ``out = f(a) * b``. Backward,
    ``d<name>`` multiplies ``grad`` by the derivative at ``fwd_input`` and has the dtype of ``fwd_input``; of a gated one it is
    ``[grad * f'(a) * b, grad * f(a)]`` side by side. ``dbias_d<name>`` gives ``[grad_bias, grad_input]``: the row sum ``[last]`` of the gradient
    *after* the derivative, and that gradient, both in ``grad``'s dtype. Raises ``ShapeError`` for a gated input of odd width, or a gradient whose
    shape does not belong to ``fwd_input``'s. Unquantized operands may be fp64: then all is computed in it.
    """


def _forward(self: Any, input: Tensor, quantizer: Quantizer | None) -> Any: ...


def _backward(self: Any, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> Any: ...


def _backward_with_bias(self: Any, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> list[Any]: ...


def _scaled(self: Any, input: Tensor, act_scales: Tensor, quantizer: Quantizer | None, glu_interleave_size: Size = 0) -> Any: ...


def _scaled_backward(
    self: Any,
    grad: Tensor,
    fwd_input: Tensor,
    act_scales: Tensor,
    quantizer: Quantizer | None,
    glu_interleave_size: Size = 0,
    compute_scale_grad: bool = True,
) -> Any: ...


_SCALED = """

``act_scales`` has one scale per row of ``input``, ``[*leading]`` in any of the three dtypes; there is one rounding, after the scale. Raises
``ShapeError`` for another number of scales."""
_SCALED_BACKWARD = """

``grad_scales`` has the shape and dtype of ``act_scales``, or is None without ``compute_scale_grad``."""
_INTERLEAVED = """
A ``glu_interleave_size`` k > 0 says that the operands alternate in blocks of k columns, ``[a_0..k-1, b_0..k-1, a_k..2k-1, ...]``, in the input and in
its gradient. Raises ``ShapeError`` for a width that is no whole number of blocks."""


def _declare(like: Callable[..., Any], name: str, doc: str, options: Sequence[Option] = (), without: str = "", **where: str) -> None:
    """Declare ``name`` with the signature of ``like``, the options after its quantizer, and not the parameter ``without``."""

    def method(self: Any) -> Any: ...

    signature = inspect.signature(like)
    parameters = [p for p in signature.parameters.values() if p.name != without]
    asks = [p.name for p in parameters[1:] if p.default is p.empty]
    parameters[1 + len(asks) : 1 + len(asks)] = [
        Parameter(option.name, Parameter.POSITIONAL_OR_KEYWORD, default=option.default, annotation=option.domain) for option in options
    ]
    method.__name__, method.__doc__ = name, doc
    method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    setattr(Activation, name, function(*asks, **where)(method))


for _row in ACTIVATIONS:
    _f, _df, _options = _row.name, _row.gradient, _row.options
    _input, _point = ("real [* n]", "real [*m 2*h]") if _row.gated else ("real [*]", "real [*m h]")
    _declare(_forward, _f, _row.doc, _options, input=_input)
    _declare(_backward, _df, _row.gradient_doc, _options, grad="real [*m h]", fwd_input=_point)
    if not _row.gated:
        _doc = f"``[grad_bias, grad_input]``: the row sum of ``{_df}(grad, fwd_input)``, and ``{_df}(grad, fwd_input)``."
        _declare(_backward_with_bias, f"dbias_{_df}", _doc, grad="real [*m h]", fwd_input=_point)
    if _row.scaled:
        _blocks, _without = (_INTERLEAVED, "") if _row.gated else ("", "glu_interleave_size")
        _doc = f"``{_f}(input) * act_scales[row]``.{_SCALED}{_blocks}"
        _declare(_scaled, f"scaled_{_f}", _doc, _options, _without, input="real [*m n]", act_scales="real (m)")
        _doc = f"``(grad_input, grad_scales)``: ``{_df}(grad * act_scales[row])``, and each row's ``sum(grad * {_f}(fwd_input))``."
        _doc = f"{_doc}{_SCALED_BACKWARD}{_blocks}"
        _declare(_scaled_backward, f"scaled_{_df}", _doc, _options, _without, grad="real [*m h]", fwd_input=_point, act_scales="real (m)")
