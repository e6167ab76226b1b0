"""Optimizer kernels over lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.tex.interface.optimizer import Optimizer

__all__ = ["OptimizerKernels"]


class OptimizerKernels(Optimizer):
    def multi_tensor_scale(self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], scale: float) -> None:
        _check(tensor_lists, (2,), "multi_tensor_scale")
        for x, out in zip(*tensor_lists, strict=True):
            finite = x.isfinite().all()
            out.copy_(x.float() * scale)
            noop_flag.masked_fill_(~finite, 1)

    def multi_tensor_l2norm(
        self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], per_tensor_python: bool | None
    ) -> tuple[Any, Any]:
        _check(tensor_lists, (1,), "multi_tensor_l2norm")
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
        _check(tensor_lists, (4, 5), "multi_tensor_adam")
        if mode not in (0, 1):
            raise ArgumentError(expected("0 (L2) or 1 (AdamW)", of="mode of multi_tensor_adam", got=mode, do="pass one of the two"))
        correction1 = 1 - beta1**step if bias_correction else 1.0
        correction2 = 1 - beta2**step if bias_correction else 1.0
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


def _check(tensor_lists: Sequence[Sequence[Tensor]], counts: tuple[int, ...], function: str) -> None:
    if len(tensor_lists) not in counts:
        wanted = " or ".join(map(str, counts))
        raise ArgumentError(expected(f"{wanted} lists", of=f"tensor_lists of {function}", got=len(tensor_lists), do="pass the lists it documents"))
    lengths = [len(tensors) for tensors in tensor_lists]
    if len(set(lengths)) > 1:
        raise ArgumentError(expected("lists of equal length", of=f"tensor_lists of {function}", got=lengths, do="pass one of each per parameter"))
    for tensors in zip(*tensor_lists, strict=True):
        shapes = [tuple(x.shape) for x in tensors]
        if any(x.numel() != tensors[0].numel() for x in tensors):
            raise ShapeError(expected("equal shapes", of=f"tensors that belong together in {function}", got=shapes, do="order the lists alike"))
