"""Optimizer kernels over lists of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.block_fp8 import BLOCK_FP8
from fusible.tex.backends.torch_backend.kernels import TorchKernels
from fusible.tex.calls.transaction import commit
from fusible.tex.formulas.optimizer import OptimizerFormulas

__all__ = ["OptimizerKernels"]


class OptimizerKernels(TorchKernels, OptimizerFormulas):
    _blocks, _alike = BLOCK_FP8, staticmethod(Tensor.numel)
    _floats = torch.float32, torch.bfloat16, torch.float16
    _bytes = torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2
    _exponents = torch.uint8, torch.float8_e8m0fnu

    def _norms(self, tensors: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        norms = torch.stack([torch.linalg.vector_norm(x, dtype=torch.float32) for x in tensors])
        return torch.linalg.vector_norm(norms).view(1), norms

    def _less_power(self, beta: float, steps: Tensor) -> Tensor:
        return -torch.expm1(steps.float() * math.log(beta))

    def _write_together(self, old: Sequence[Tensor], new: Sequence[Tensor], skip: Tensor | None = None) -> None:
        pairs = zip(old, new, strict=True)
        commit([partial(into.copy_, value if skip is None else torch.where(skip, into, value)) for into, value in pairs])
