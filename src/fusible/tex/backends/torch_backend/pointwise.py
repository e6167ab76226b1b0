"""The activation functions in torch: the formulas, but for those of which torch has a kernel, or that may work in place."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible.tex.backends.torch_backend.arrays import TORCH
from fusible.tex.formulas.pointwise import Pointwise, gates, pointwise

__all__ = ["GATES", "POINTWISE"]

_gelu_backward = torch.ops.aten.gelu_backward.default
_silu_backward = torch.ops.aten.silu_backward.default
_relu_backward = torch.ops.aten.threshold_backward.default


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _dgelu(g: Tensor, x: Tensor) -> Tensor:
    return _gelu_backward(g, x, approximate="tanh")


def _qgelu(x: Tensor) -> Tensor:
    return torch.sigmoid(x * 1.702).mul_(x)


def _dqgelu(g: Tensor, x: Tensor) -> Tensor:
    return _silu_backward(g, x * 1.702)


def _drelu(g: Tensor, x: Tensor) -> Tensor:
    return _relu_backward(g, x, 0)


def _dsrelu(g: Tensor, x: Tensor) -> Tensor:
    return torch.relu(x).mul_(2).mul_(g)


def _dsigmoid(g: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.sigmoid_backward.default(g, torch.sigmoid(x))


POINTWISE = {
    **pointwise(TORCH),
    "gelu": Pointwise(_gelu, _dgelu, one_kernel=True),
    "silu": Pointwise(F.silu, _silu_backward, one_kernel=True),
    "relu": Pointwise(torch.relu, _drelu, one_kernel=True),
    "qgelu": Pointwise(_qgelu, _dqgelu),
    "srelu": Pointwise(lambda x: torch.relu(x).square_(), _dsrelu),
    "sigmoid": Pointwise(torch.sigmoid, _dsigmoid),
}
GATES = gates(TORCH, POINTWISE)
