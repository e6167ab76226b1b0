"""Optimizer kernels over lists of lazy tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible import lazy
from fusible.errors import ArgumentError, ShapeError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.operands import fp32
from fusible.tex.interface.optimizer import Optimizer

__all__ = ["OptimizerKernels"]


class OptimizerKernels(Optimizer):
    def multi_tensor_scale(self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], scale: float) -> None:
        _check(tensor_lists, (2,), "multi_tensor_scale")
        for x, out in zip(*tensor_lists, strict=True):
            _raise_unless(lazy.all(lazy.is_finite(x)), noop_flag)
            out.assign_(lazy.cast(fp32(x) * scale, out.dtype))

    def multi_tensor_l2norm(
        self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], per_tensor_python: bool | None = None
    ) -> tuple[Any, Any]:
        _check(tensor_lists, (1,), "multi_tensor_l2norm")
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
        _check(tensor_lists, (4, 5), "multi_tensor_adam")
        if mode not in (0, 1):
            raise ArgumentError(expected("0 (L2) or 1 (AdamW)", of="mode of multi_tensor_adam", got=mode, do="pass one of the two"))
        correction1 = 1 - beta1**step if bias_correction else 1.0
        correction2 = 1 - beta2**step if bias_correction else 1.0
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


def _check(tensor_lists: Sequence[Sequence[Tensor]], counts: tuple[int, ...], function: str) -> None:
    if len(tensor_lists) not in counts:
        wanted = " or ".join(map(str, counts))
        raise ArgumentError(expected(f"{wanted} lists", of=f"tensor_lists of {function}", got=len(tensor_lists), do="pass the lists it documents"))
    lengths = [len(tensors) for tensors in tensor_lists]
    if len(set(lengths)) > 1:
        raise ArgumentError(expected("lists of equal length", of=f"tensor_lists of {function}", got=lengths, do="pass one of each per parameter"))
    for tensors in zip(*tensor_lists, strict=True):
        shapes = [tuple(x.shape) for x in tensors]
        if len(set(shapes)) > 1:
            raise ShapeError(expected("equal shapes", of=f"tensors that belong together in {function}", got=shapes, do="order the lists alike"))
