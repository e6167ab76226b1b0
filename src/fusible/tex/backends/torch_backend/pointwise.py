"""The activation functions in torch: the formulas, but for those of which torch has a kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible.tex.backends.torch_backend.arrays import TORCH
from fusible.tex.formulas.pointwise import Functions, Pointwise

__all__ = ["GATES", "POINTWISE"]

_formulas = Functions(TORCH)
_gelu_backward = torch.ops.aten.gelu_backward.default
_relu_backward = torch.ops.aten.threshold_backward.default
_sigmoid_backward = torch.ops.aten.sigmoid_backward.default


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _dgelu(g: Tensor, x: Tensor) -> Tensor:
    return _gelu_backward(g, x, approximate="tanh")


def _erf_gelu(x: Tensor) -> Tensor:
    """By the formula on CPUs, where torch's kernel gives NaN for infinity, and numbers other than 0 for large negative ones."""
    return TORCH.cast(_formulas.erf_gelu(TORCH.wide(x)), x.dtype) if x.is_cpu else F.gelu(x)


def _erf_dgelu(g: Tensor, x: Tensor) -> Tensor:
    return TORCH.cast(_formulas.erf_dgelu(TORCH.wide(g), TORCH.wide(x)), x.dtype) if x.is_cpu else _gelu_backward(g, x, approximate="none")


def _drelu(g: Tensor, x: Tensor) -> Tensor:
    return _relu_backward(g, x, 0)


def _dsigmoid(g: Tensor, x: Tensor) -> Tensor:
    return _sigmoid_backward(g, torch.sigmoid(x))


_KERNELS = {
    "gelu": Pointwise(_gelu, _dgelu, one_kernel=True),
    "erf_gelu": Pointwise(_erf_gelu, _erf_dgelu, one_kernel=True),
    "silu": Pointwise(F.silu, torch.ops.aten.silu_backward.default, one_kernel=True),
    "relu": Pointwise(torch.relu, _drelu, one_kernel=True),
    "sigmoid": Pointwise(torch.sigmoid, _dsigmoid),
}
_functions = Functions(TORCH, _KERNELS)
POINTWISE, GATES = _functions.pointwise, _functions.gates
