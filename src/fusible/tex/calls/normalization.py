"""The norms by the steps that backends differ in: how each is computed, and its gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

from fusible.tex.calls.checks import check_norm_backward, check_norm_parameter, check_norm_statistic
from fusible.tex.interface.arguments import DTypeLike, Tensor
from fusible.tex.interface.normalization import Normalization
from fusible.tex.interface.prim import Prim
from fusible.tex.protocol import QuantizerLike, TensorLike, check_shape

__all__ = ["NormGradient", "NormOutput", "NormalizationBySteps"]


class NormOutput(NamedTuple):
    """Where a norm writes: ``dtype`` as tex was given it, a quantizer or None, and a tensor or None."""

    quantizer: QuantizerLike | None
    dtype: DTypeLike
    out: Tensor | None


class NormGradient(NamedTuple):
    """What the gradients of a norm follow from, plain tensors that fit ``x``: ``mu`` is None of RMSNorm, ``add`` is what is added to dx, or None."""

    dz: Any
    x: Any
    add: Any
    mu: Any
    rsigma: Any
    gamma: Any
    zero_centered: bool


class NormalizationBySteps(Normalization, Prim):
    """Checks the arguments of each function and hands them to a backend's steps."""

    HELPERS = frozenset({"norm_operand", "layernorm", "layernorm_gradient", "rmsnorm", "rmsnorm_gradient"})

    def norm_operand(self, x: Tensor) -> Any:
        """``x`` as a plain tensor."""
        raise NotImplementedError

    def layernorm(self, x: TensorLike, gamma: TensorLike, bias: TensorLike | None, eps: float, zero_centered: bool, output: NormOutput) -> list[Any]:
        """``[y, mu, rsigma]``."""
        raise NotImplementedError

    def rmsnorm(self, x: TensorLike, gamma: TensorLike, eps: float, zero_centered: bool, output: NormOutput) -> list[Any]:
        """``[y, None, rsigma]``."""
        raise NotImplementedError

    def layernorm_gradient(self, of: NormGradient) -> list[Any]:
        """``[dx, dgamma, dbeta]``."""
        raise NotImplementedError

    def rmsnorm_gradient(self, of: NormGradient) -> list[Any]:
        """``[dx, dgamma]``."""
        raise NotImplementedError

    def layernorm_fwd(
        self, input: Tensor, weight: Tensor, bias: Any, eps: float, ln_out: Any, quantizer: Any, otype: DTypeLike, zero_centered_gamma: bool
    ) -> list[Any]:
        x, gamma = self.norm_operand(input), self.norm_operand(weight)
        check_norm_parameter(gamma, x, "weight of layernorm_fwd")
        if bias is not None:
            bias = self.norm_operand(bias)
            check_norm_parameter(bias, x, "bias of layernorm_fwd")
        return self.layernorm(x, gamma, bias, eps, zero_centered_gamma, NormOutput(quantizer, otype, ln_out))

    def layernorm_bwd(self, dz: Tensor, x: Tensor, mu: TensorLike, rsigma: TensorLike, gamma: Tensor, zero_centered_gamma: bool) -> list[Any]:
        return self.layernorm_gradient(self._checked("layernorm_bwd", dz, x, None, mu, rsigma, gamma, zero_centered_gamma))

    def prim_layernorm_bwd_add(
        self, dz: Tensor, x: Tensor, add: Tensor, mu: TensorLike, rsigma: TensorLike, gamma: Tensor, zero_centered_gamma: bool
    ) -> list[Any]:
        return self.layernorm_gradient(self._checked("prim.layernorm_bwd_add", dz, x, add, mu, rsigma, gamma, zero_centered_gamma))

    def rmsnorm_fwd(
        self, input: Tensor, weight: Tensor, eps: float, ln_out: Any, quantizer: Any, otype: DTypeLike, zero_centered_gamma: bool
    ) -> list[Any]:
        x, gamma = self.norm_operand(input), self.norm_operand(weight)
        check_norm_parameter(gamma, x, "weight of rmsnorm_fwd")
        return self.rmsnorm(x, gamma, eps, zero_centered_gamma, NormOutput(quantizer, otype, ln_out))

    def rmsnorm_bwd(self, dz: Tensor, x: Tensor, rsigma: TensorLike, gamma: Tensor, zero_centered_gamma: bool) -> list[Any]:
        return self.rmsnorm_gradient(self._checked("rmsnorm_bwd", dz, x, None, None, rsigma, gamma, zero_centered_gamma))

    def rmsnorm_bwd_add(self, dz: Tensor, x: Tensor, add: Tensor, rsigma: TensorLike, gamma: Tensor, zero_centered_gamma: bool) -> list[Any]:
        return self.rmsnorm_gradient(self._checked("rmsnorm_bwd_add", dz, x, add, None, rsigma, gamma, zero_centered_gamma))

    def _checked(
        self, function: str, dz: Tensor, x: Tensor, add: Any, mu: TensorLike | None, rsigma: TensorLike, gamma: Tensor, zero_centered: bool
    ) -> NormGradient:
        x, plain = self.norm_operand(x), self.norm_operand
        if add is not None:
            add = plain(add)
            check_shape(add, x.shape, f"add of {function}")
        dz, gamma = plain(dz), plain(gamma)
        check_norm_backward(dz, x, rsigma, gamma, function)
        if mu is not None:
            check_norm_statistic(mu, x, f"mu of {function}")
        return NormGradient(dz, x, add, mu, rsigma, gamma, zero_centered)
