"""Optimizer kernels over lists of lazy tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.operands import fp32
from fusible.tex.checks import adam_corrections, check_lists
from fusible.tex.interface.optimizer import Optimizer

__all__ = ["OptimizerKernels"]


class OptimizerKernels(Optimizer):
    def multi_tensor_scale(self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], scale: float) -> None:
        check_lists(tensor_lists, (2,), "multi_tensor_scale", _shape)
        for x, out in zip(*tensor_lists, strict=True):
            _raise_unless(lazy.all(lazy.is_finite(x)), noop_flag)
            out.assign_(lazy.cast(fp32(x) * scale, out.dtype))

    def multi_tensor_l2norm(
        self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], per_tensor_python: bool | None = None
    ) -> tuple[Any, Any]:
        check_lists(tensor_lists, (1,), "multi_tensor_l2norm", _shape)
        squares = lazy.concatenate([lazy.reshape(lazy.sum(fp32(x) * fp32(x)), (1,)) for x in tensor_lists[0]], 0)
        norm = lazy.reshape(lazy.sqrt(lazy.sum(squares)), (1,))
        _raise_unless(lazy.all(lazy.is_finite(norm)), noop_flag)
        return norm, lazy.sqrt(squares) if per_tensor_python else lazy.zeros((0,))

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
        check_lists(tensor_lists, (4, 5), "multi_tensor_adam", _shape)
        correction1, correction2 = adam_corrections(mode, bias_correction, step, beta1, beta2)
        for g, p, m, v, *master in zip(*tensor_lists, strict=True):
            weight = master[0] if master else p
            value, gradient = fp32(weight), fp32(g)
            if mode == 0 and weight_decay:
                gradient = gradient + value * weight_decay
            first = fp32(m) * beta1 + gradient * (1 - beta1)
            second = fp32(v) * beta2 + gradient * gradient * (1 - beta2)
            update = (first / correction1) / (lazy.sqrt(second / correction2) + epsilon)
            if mode == 1 and weight_decay:
                update = update + value * weight_decay
            new = value - update * lr
            for tensor, result in ((m, first), (v, second), (weight, new), *(((p, new),) if master else ())):
                tensor.assign_(lazy.cast(result, tensor.dtype))


def _raise_unless(condition: Tensor, flag: Tensor) -> None:
    """Set ``flag`` to 1 unless ``condition``, a bool of one element."""
    flag.assign_(lazy.where(condition, flag, lazy.ones(flag.shape, flag.dtype)))


def _shape(x: Tensor) -> tuple[int, ...]:
    return x.shape
