"""Activations: pointwise and gated, forward and backward."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from typing import Any

from fusible.tex.interface.arguments import Quantizer, Tensor
from fusible.tex.interface.declare import function
from fusible.tex.interface.domains import Finite, Limit, Positive, Size

__all__ = ["Activation"]


class Activation:
    """``out = f(x)``, computed in fp32 and rounded once to ``input``'s dtype, or quantized where a quantizer is given.

    The gated ones take ``[*leading, 2H]`` and give ``[*leading, H]``: with ``a`` the first half and ``b`` the second, ``out = f(a) * b``. Backward,
    ``d<name>`` multiplies ``grad`` by the derivative at ``fwd_input`` and has the dtype of ``fwd_input``; of a gated one it is
    ``[grad * f'(a) * b, grad * f(a)]`` side by side. ``dbias_d<name>`` gives ``[grad_bias, grad_input]``: the row sum ``[last]`` of the gradient
    *after* the derivative, and that gradient, both in ``grad``'s dtype. Below, ``s`` is the logistic function. Raises ``ShapeError`` for a gated
    input of odd width, or a gradient whose shape does not belong to ``fwd_input``'s. Unquantized operands may be fp64: then all is computed in it.
    """

    @function("input", "quantizer", input="real [* n]")
    def glu(self, input: Tensor, quantizer: Quantizer | None) -> Any:
        """``s(a) * b`` (Dauphin et al. 2017, arXiv:1612.08083)."""

    @function("input", "quantizer", input="real [*]")
    def gelu(self, input: Tensor, quantizer: Quantizer | None) -> Any:
        """``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))``: the tanh form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""

    @function("input", "quantizer", input="real [* n]")
    def geglu(self, input: Tensor, quantizer: Quantizer | None) -> Any:
        """``gelu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""

    @function("input", "quantizer", input="real [*]")
    def qgelu(self, input: Tensor, quantizer: Quantizer | None) -> Any:
        """``x * s(1.702 x)``: the sigmoid form of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""

    @function("input", "quantizer", input="real [* n]")
    def qgeglu(self, input: Tensor, quantizer: Quantizer | None) -> Any:
        """``qgelu(a) * b``."""

    @function("input", "quantizer", input="real [*]")
    def relu(self, input: Tensor, quantizer: Quantizer | None) -> Any:
        """``max(x, 0)``."""

    @function("input", "quantizer", input="real [* n]")
    def reglu(self, input: Tensor, quantizer: Quantizer | None) -> Any:
        """``relu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""

    @function("input", "quantizer", input="real [*]")
    def srelu(self, input: Tensor, quantizer: Quantizer | None) -> Any:
        """``max(x, 0)^2``: squared ReLU (So et al. 2021, arXiv:2109.08668)."""

    @function("input", "quantizer", input="real [* n]")
    def sreglu(self, input: Tensor, quantizer: Quantizer | None) -> Any:
        """``srelu(a) * b``."""

    @function("input", "quantizer", input="real [*]")
    def silu(self, input: Tensor, quantizer: Quantizer | None) -> Any:
        """``x * s(x)`` (Elfwing et al. 2018, arXiv:1702.03118)."""

    @function("input", "quantizer", input="real [* n]")
    def swiglu(self, input: Tensor, quantizer: Quantizer | None) -> Any:
        """``silu(a) * b`` (Shazeer 2020, arXiv:2002.05202)."""

    @function("input", "quantizer", input="real [* n]")
    def situglu(self, input: Tensor, quantizer: Quantizer | None, beta1: Positive = 4.0, beta2: Positive = 25.0) -> Any:
        """``beta1 tanh(a / beta1) s(a) * beta2 tanh(b / beta2)``: SwiGLU whose two factors saturate at ``beta1`` and ``beta2``."""

    @function("input", "quantizer", input="real [* n]")
    def clamped_swiglu(
        self, input: Tensor, quantizer: Quantizer | None, limit: Limit = 7.0, alpha: Finite = 1.702, glu_linear_offset: Finite = 1.0
    ) -> Any:
        """``c s(alpha c) * (clamp(b, -limit, limit) + glu_linear_offset)`` with ``c = min(a, limit)``: the gate of gpt-oss."""

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m 2*h]")
    def dglu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> Any:
        """``[grad s(a)(1 - s(a)) b, grad s(a)]``."""

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m h]")
    def dgelu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> Any:
        """``grad * gelu'(fwd_input)``, of the tanh form."""

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m 2*h]")
    def dgeglu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> Any:
        """``[grad gelu'(a) b, grad gelu(a)]``."""

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m h]")
    def dqgelu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> Any:
        """``grad * (s + 1.702 x s (1 - s))`` with ``s = s(1.702 x)``."""

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m 2*h]")
    def dqgeglu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> Any:
        """``[grad qgelu'(a) b, grad qgelu(a)]``."""

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m h]")
    def drelu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> Any:
        """``grad`` where ``x > 0``, else 0."""

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m 2*h]")
    def dreglu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> Any:
        """``[grad relu'(a) b, grad relu(a)]``."""

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m h]")
    def dsrelu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> Any:
        """``grad * max(2 x, 0)``."""

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m 2*h]")
    def dsreglu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> Any:
        """``[grad srelu'(a) b, grad srelu(a)]``."""

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m h]")
    def dsilu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> Any:
        """``grad * (s + x s (1 - s))`` with ``s = s(x)``."""

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m 2*h]")
    def dswiglu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> Any:
        """``[grad silu'(a) b, grad silu(a)]``."""

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m 2*h]")
    def dsituglu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None, beta1: Positive = 4.0, beta2: Positive = 25.0) -> Any:
        """``[grad ((1 - t^2) s + beta1 t s (1 - s)) up(b), grad (1 - tanh(b / beta2)^2) gate(a)]``, ``t = tanh(a / beta1)``, ``s = s(a)``.

        ``gate(a) = beta1 t s`` and ``up(b) = beta2 tanh(b / beta2)`` are the two factors of ``situglu``.
        """

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m 2*h]")
    def clamped_dswiglu(
        self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None, limit: Limit = 7.0, alpha: Finite = 1.702, glu_linear_offset: Finite = 1.0
    ) -> Any:
        """``[grad (s + alpha c s (1 - s)) (clamp(b) + glu_linear_offset), grad c s]``, ``c = min(a, limit)``, ``s = s(alpha c)``.

        The first half is 0 where ``a > limit``, the second where ``b`` lies outside ``[-limit, limit]``.
        """

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m h]")
    def dbias_dgelu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> list[Any]:
        """``[grad_bias, grad_input]``: the row sum of ``dgelu(grad, fwd_input)``, and ``dgelu(grad, fwd_input)``."""

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m h]")
    def dbias_dsilu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> list[Any]:
        """``[grad_bias, grad_input]``: the row sum of ``dsilu(grad, fwd_input)``, and ``dsilu(grad, fwd_input)``."""

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m h]")
    def dbias_drelu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> list[Any]:
        """``[grad_bias, grad_input]``: the row sum of ``drelu(grad, fwd_input)``, and ``drelu(grad, fwd_input)``."""

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m h]")
    def dbias_dqgelu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> list[Any]:
        """``[grad_bias, grad_input]``: the row sum of ``dqgelu(grad, fwd_input)``, and ``dqgelu(grad, fwd_input)``."""

    @function("grad", "fwd_input", "quantizer", grad="real [*m h]", fwd_input="real [*m h]")
    def dbias_dsrelu(self, grad: Tensor, fwd_input: Tensor, quantizer: Quantizer | None) -> list[Any]:
        """``[grad_bias, grad_input]``: the row sum of ``dsrelu(grad, fwd_input)``, and ``dsrelu(grad, fwd_input)``."""

    @function("input", "act_scales", "quantizer", input="real [*m n]", act_scales="real (m)")
    def scaled_swiglu(self, input: Tensor, act_scales: Tensor, quantizer: Quantizer | None, glu_interleave_size: Size = 0) -> Any:
        """``swiglu(input) * act_scales[row]``, one scale per row of ``input [*leading, 2H]``.

        In every ``scaled_`` function ``act_scales`` is ``[*leading]`` in any of the three dtypes, and there is one rounding, after the scale. A
        ``glu_interleave_size`` k > 0 says that the operands alternate in blocks of k columns, ``[a_0..k-1, b_0..k-1, a_k..2k-1, ...]``, in the input
        and in its gradient. Raises ``ShapeError`` for another number of scales, or a width that is no whole number of blocks.
        """

    @function("input", "act_scales", "quantizer", input="real [*m n]", act_scales="real (m)")
    def scaled_situglu(
        self,
        input: Tensor,
        act_scales: Tensor,
        quantizer: Quantizer | None,
        beta1: Positive = 4.0,
        beta2: Positive = 25.0,
        glu_interleave_size: Size = 0,
    ) -> Any:
        """``situglu(input) * act_scales[row]``; see ``scaled_swiglu``."""

    @function("input", "act_scales", "quantizer", input="real [*m n]", act_scales="real (m)")
    def scaled_clamped_swiglu(
        self,
        input: Tensor,
        act_scales: Tensor,
        quantizer: Quantizer | None,
        limit: Limit = 7.0,
        alpha: Finite = 1.702,
        glu_linear_offset: Finite = 1.0,
        glu_interleave_size: Size = 0,
    ) -> Any:
        """``clamped_swiglu(input) * act_scales[row]``; see ``scaled_swiglu``."""

    @function("input", "act_scales", "quantizer", input="real [*m n]", act_scales="real (m)")
    def scaled_srelu(self, input: Tensor, act_scales: Tensor, quantizer: Quantizer | None) -> Any:
        """``srelu(input) * act_scales[row]`` of ``[*leading, H]``."""

    @function("grad", "fwd_input", "act_scales", "quantizer", grad="real [*m h]", fwd_input="real [*m 2*h]", act_scales="real (m)")
    def scaled_dswiglu(
        self,
        grad: Tensor,
        fwd_input: Tensor,
        act_scales: Tensor,
        quantizer: Quantizer | None,
        glu_interleave_size: Size = 0,
        compute_scale_grad: bool = True,
    ) -> Any:
        """``(grad_input, grad_scales)``: ``dswiglu(grad * act_scales[row])``, and each row's ``sum(grad * swiglu(fwd_input))``.

        In every ``scaled_d`` function ``grad_scales`` has the shape and dtype of ``act_scales``, or is None without ``compute_scale_grad``.
        """

    @function("grad", "fwd_input", "act_scales", "quantizer", grad="real [*m h]", fwd_input="real [*m 2*h]", act_scales="real (m)")
    def scaled_dsituglu(
        self,
        grad: Tensor,
        fwd_input: Tensor,
        act_scales: Tensor,
        quantizer: Quantizer | None,
        beta1: Positive = 4.0,
        beta2: Positive = 25.0,
        glu_interleave_size: Size = 0,
        compute_scale_grad: bool = True,
    ) -> Any:
        """``(grad_input, grad_scales)`` of ``scaled_situglu``; see ``scaled_dswiglu``."""

    @function("grad", "fwd_input", "act_scales", "quantizer", grad="real [*m h]", fwd_input="real [*m 2*h]", act_scales="real (m)")
    def scaled_clamped_dswiglu(
        self,
        grad: Tensor,
        fwd_input: Tensor,
        act_scales: Tensor,
        quantizer: Quantizer | None,
        limit: Limit = 7.0,
        alpha: Finite = 1.702,
        glu_linear_offset: Finite = 1.0,
        glu_interleave_size: Size = 0,
        compute_scale_grad: bool = True,
    ) -> Any:
        """``(grad_input, grad_scales)`` of ``scaled_clamped_swiglu``; see ``scaled_dswiglu``."""

    @function("grad", "fwd_input", "act_scales", "quantizer", grad="real [*m h]", fwd_input="real [*m h]", act_scales="real (m)")
    def scaled_dsrelu(self, grad: Tensor, fwd_input: Tensor, act_scales: Tensor, quantizer: Quantizer | None, compute_scale_grad: bool = True) -> Any:
        """``(grad_input, grad_scales)`` of ``scaled_srelu``; see ``scaled_dswiglu``."""
