"""Normalizations: ``nn.LayerNorm``, ``nn.RMSNorm``, and the RMSNorms of other libraries, whatever their classes are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from fusible import ops
from fusible.models.convert.as_found import Options, has_options, options_of
from fusible.models.convert.linear import why_no_parameters
from fusible.models.convert.pipelines import ConvertedModule, placeholder
from fusible.models.convert.swapping import Swap
from fusible.models.convert.trying import computes, draw, takes_one_tensor, tried
from fusible.pytorch.engine.torch_autocast import is_in_force_on, without_torch_autocast
from fusible.pytorch.engine.weights import PLAIN
from fusible.pytorch.modules.normalization import LayerNorm, RMSNorm
from fusible.quantized import Recipe

__all__ = ["FoundNorm", "find_norm", "is_like_norm", "norm_swap"]

_EPSILONS = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps")


class ConvertedNorm(ConvertedModule):
    """A normalization over the last dimension as one kernel, whose sums are in fp32 and whose result is rounded once.

    Where the weight is in another precision than ``x`` or computed from other parameters, a parameter is missing, or an option has been set since it
    was converted, its former class decides what comes out.
    """

    eps: float
    features: int
    zero_centered_gamma: bool
    names: ClassVar[tuple[str, ...]]
    _found: Options
    """Its options when it was converted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_as_found(x.dtype):
            return self.original.forward(self, x)
        if is_in_force_on(x):  # by which torch's norms stay in the precision of their input, too
            with without_torch_autocast(x.device.type):
                return self._run(x)
        return self._run(x)

    def _is_as_found(self, dtype: torch.dtype) -> bool:
        for name in self.names:
            parameter = self._parameters.get(name)
            if parameter is None or type(parameter) not in PLAIN or parameter.shape[0] != self.features:
                return False
        return self._parameters["weight"].dtype is dtype and has_options(self, self._found)  # type: ignore[union-attr]  # pyright: ignore


class ConvertedLayerNorm(ConvertedNorm, LayerNorm):
    """``y = (x - mean) * rsigma * weight + bias``."""


class ConvertedRMSNorm(ConvertedNorm, RMSNorm):
    """``y = x * rsigma * weight``, or ``1 + weight`` in its place."""


@dataclass(frozen=True)
class FoundNorm:
    """What a norm computes. ``wrong``: why it is left as it is, instead."""

    centered: bool = False
    zero_centered_gamma: bool = False
    eps: float = 0.0
    wrong: str = ""

    @property
    def text(self) -> str:
        return "LayerNorm" if self.centered else "RMSNorm by 1 + weight" if self.zero_centered_gamma else "RMSNorm"


def is_like_norm(module: nn.Module) -> bool:
    """Whether a module looks like a normalization with a weight."""
    return "norm" in type(module).__name__.lower() and not module._modules and module._parameters.get("weight", None) is not None


def find_norm(module: nn.Module) -> FoundNorm:
    """What a module that ``is_like_norm`` computes."""
    parameters = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    eps = next((value for name in _EPSILONS if isinstance(value := vars(module).get(name), float)), None)
    if any(buffer is not None for buffer in module._buffers.values()):
        return FoundNorm(wrong="it keeps statistics")
    if not parameters.keys() <= {"weight", "bias"} or any(parameter.ndim != 1 for parameter in parameters.values()):
        return FoundNorm(wrong="it has other parameters than a weight and a bias for each column")
    if eps is None:
        return FoundNorm(wrong="it says no epsilon")
    if not takes_one_tensor(module):
        return FoundNorm(wrong="it takes more than one tensor")
    wrong = why_no_parameters(module)
    return FoundNorm(wrong=wrong) if wrong else _by_trying(module, len(parameters["weight"]), "bias" in parameters, eps)


def _by_trying(module: nn.Module, features: int, biased: bool, eps: float) -> FoundNorm:
    rows = 3 if features != 3 else 2
    x = draw(2, rows, features) * torch.tensor([0.003, 1.0], dtype=torch.float32, device="cpu").view(2, 1, 1)  # of small rows the epsilon counts
    weight, bias = draw(features, seed=1), draw(features, seed=2)
    parameters: dict[str, torch.Tensor | None] = dict.fromkeys(module._parameters)
    parameters.update({name: nn.Parameter(value) for name, value in (("weight", weight), ("bias", bias)) if module._parameters.get(name) is not None})
    y = tried(module, x, parameters)
    if y is not None and not computes(tried(module, x, parameters, training=True), y):
        return FoundNorm(wrong="it computes otherwise in training")
    if biased:
        matches = computes(y, nn.functional.layer_norm(x, (features,), weight, bias, eps))
        return FoundNorm(centered=True, eps=eps) if matches else FoundNorm(wrong="it computes no layer normalization over the last dimension")
    normalized = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    for zero_centered in (False, True):
        if computes(y, normalized * (weight + zero_centered)):
            return FoundNorm(zero_centered_gamma=zero_centered, eps=eps)
    return FoundNorm(wrong="it computes neither x / rms(x) * weight nor x / rms(x) * (1 + weight)")


def norm_swap(module: nn.Module, found: FoundNorm, recipe: Recipe | None) -> Swap:
    """The swap of a norm that was found to be ours."""
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    assert weight is not None
    options: dict[str, Any] = {"eps": found.eps, "zero_centered_gamma": found.zero_centered_gamma}
    if bias is None:
        op, names, kind = ops.RMSNorm(placeholder(weight), **options), ("weight",), ConvertedRMSNorm
    else:
        op, names, kind = ops.LayerNorm(placeholder(weight), placeholder(bias), **options), ("weight", "bias"), ConvertedLayerNorm
    own = {**options, "features": len(weight), "_found": options_of(module)}
    attributes = {**kind.attributes(module, [(op, module, names)], recipe), **own}
    return Swap(module, kind, attributes)
