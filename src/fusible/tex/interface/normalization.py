"""Layer and RMS normalization."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from typing import Any

from fusible.tex.interface.arguments import Quantizer, Tensor
from fusible.tex.interface.declare import function
from fusible.tex.interface.domains import Epsilon, RealDType

__all__ = ["Normalization"]


class Normalization:
    """Normalization over the last dimension N of ``x [*leading, N]``, in fp32 with one rounding at the store.

    ``g = gamma + 1`` where ``zero_centered_gamma``, else ``gamma``. Statistics are fp32 ``[outer]``, outer being the product of the leading
    dimensions. ``ln_out``, where given, is written and returned. With a quantizer the output is quantized: under delayed scaling from fp32, under the
    others after rounding to ``otype``. ``sm_margin`` changes no result. Raises ``ShapeError`` where ``weight`` or ``bias`` is not ``[N]``. Of an
    ``x`` in fp64 all is computed in fp64, statistics included, and nothing is quantized.
    """

    @function("input weight quantizer otype", input="real [* n]", weight="real [n]", bias="real [n]", ln_out="any [* n]", idle="sm_margin")
    def layernorm_fwd(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: Epsilon,
        ln_out: Tensor | None,
        quantizer: Quantizer | None,
        otype: RealDType,
        sm_margin: int,
        zero_centered_gamma: bool,
    ) -> list[Any]:
        """``[y, mu, rsigma]``: ``y = (x - mu) * rsigma * g + bias``, ``rsigma = 1 / sqrt(mean (x - mu)^2 + eps)`` (Ba et al. 2016,
        arXiv:1607.06450)."""

    @function("dz x gamma", dz="real [*m n]", x="real [*m n]", mu="fp32|fp64 (m)", rsigma="fp32|fp64 (m)", gamma="real [n]", idle="sm_margin")
    def layernorm_bwd(self, dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool) -> list[Any]:
        """``[dx, dgamma, dbeta]``: with ``xh = (x - mu) rsigma`` and ``dy = dz g``, ``dx = rsigma (dy - mean(dy) - xh mean(dy xh))``.

        ``dgamma = sum dz xh`` and ``dbeta = sum dz`` over rows, in ``gamma``'s dtype; ``dx`` in ``x``'s.
        """

    @function("input weight quantizer otype", input="real [* n]", weight="real [n]", ln_out="any [* n]", idle="sm_margin")
    def rmsnorm_fwd(
        self,
        input: Tensor,
        weight: Tensor,
        eps: Epsilon,
        ln_out: Tensor | None,
        quantizer: Quantizer | None,
        otype: RealDType,
        sm_margin: int,
        zero_centered_gamma: bool,
    ) -> list[Any]:
        """``[y, None, rsigma]``: ``y = x * rsigma * g``, ``rsigma = 1 / sqrt(mean x^2 + eps)`` (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    @function("dz x gamma", dz="real [*m n]", x="real [*m n]", rsigma="fp32|fp64 (m)", gamma="real [n]", idle="sm_margin")
    def rmsnorm_bwd(self, dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool) -> list[Any]:
        """``[dx, dgamma]``: with ``xh = x rsigma`` and ``dy = dz g``, ``dx = rsigma (dy - xh mean(dy xh))`` in ``x``'s dtype.

        ``dgamma = sum dz xh`` over rows, in ``gamma``'s dtype.
        """

    @function("dz x add gamma", dz="real [*m n]", x="real [*m n]", add="real [*m n]", rsigma="fp32|fp64 (m)", gamma="real [n]", idle="sm_margin")
    def rmsnorm_bwd_add(
        self, dz: Tensor, x: Tensor, add: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
    ) -> list[Any]:
        """``rmsnorm_bwd`` with ``add`` (of ``x``'s shape) added to ``dx`` in fp32, before the one rounding."""
