"""Optimizer kernels over lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.tex.checks import adam_corrections, check_lists
from fusible.tex.interface.optimizer import Optimizer

__all__ = ["OptimizerKernels"]


class OptimizerKernels(Optimizer):
    def multi_tensor_scale(self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], scale: float) -> None:
        check_lists(tensor_lists, (2,), "multi_tensor_scale", Tensor.numel)
        for x, out in zip(*tensor_lists, strict=True):
            finite = x.isfinite().all()
            out.copy_(x.float() * scale)
            noop_flag.masked_fill_(~finite, 1)

    def multi_tensor_l2norm(
        self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], per_tensor_python: bool | None
    ) -> tuple[Any, Any]:
        check_lists(tensor_lists, (1,), "multi_tensor_l2norm", Tensor.numel)
        empty = torch.empty(0, dtype=torch.float32, device=noop_flag.device)
        if not tensor_lists[0]:
            return torch.zeros(1, dtype=torch.float32, device=noop_flag.device), empty
        norms = torch.stack([torch.linalg.vector_norm(x, dtype=torch.float32) for x in tensor_lists[0]])
        norm = torch.linalg.vector_norm(norms).view(1)
        noop_flag.masked_fill_(~norm.isfinite(), 1)
        return norm, norms if per_tensor_python else empty

    def multi_tensor_adam(
        self,
        chunk_size: int,
        noop_flag: Any,
        tensor_lists: Sequence[Sequence[Any]],
        lr: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        step: int,
        mode: int,
        bias_correction: int,
        weight_decay: float,
    ) -> None:
        check_lists(tensor_lists, (4, 5), "multi_tensor_adam", Tensor.numel)
        correction1, correction2 = adam_corrections(mode, bias_correction, step, beta1, beta2)
        for g, p, m, v, *master in zip(*tensor_lists, strict=True):
            weight = master[0] if master else p
            value = weight.float()
            gradient = g.float()
            if mode == 0 and weight_decay:
                gradient = gradient.add(value, alpha=weight_decay)
            first = torch.add(m.float() * beta1, gradient, alpha=1 - beta1)
            second = torch.addcmul(v.float() * beta2, gradient, gradient, value=1 - beta2)
            update = (first / correction1).div_((second / correction2).sqrt_().add_(epsilon))
            if mode == 1 and weight_decay:
                update.add_(value, alpha=weight_decay)
            new = value.sub(update, alpha=lr)
            m.copy_(first)
            v.copy_(second)
            weight.copy_(new)
            if master:
                p.copy_(new)
