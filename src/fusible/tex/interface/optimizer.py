"""Optimizer kernels over lists of tensors."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.tex.interface.declare import function

__all__ = ["Optimizer"]


class Optimizer:
    """Each works on ``tensor_lists``: lists of equally many tensors, the i-th of each list belonging together. Arithmetic is fp32, with one rounding
    at each store. ``chunk_size`` never changes a result; ``noop_flag`` is int32 ``[1]``."""

    @function("tensor_lists")
    def multi_tensor_scale(self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], scale: float) -> None:
        """``[inputs, outputs]``: writes ``output = input * scale``; sets ``noop_flag`` to 1 where an *input* is not finite. The flag is not read."""

    @function("tensor_lists")
    def multi_tensor_l2norm(
        self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], per_tensor_python: bool | None
    ) -> tuple[Any, Any]:
        """``[x]``: ``(norm, per_tensor)``, the L2 norm over all tensors, fp32 ``[1]``, and that of each, fp32 ``[n]`` (``[0]`` unless asked for).

        Sets ``noop_flag`` to 1 where a norm is not finite. The flag is not read.
        """

    @function("tensor_lists")
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
        """``[g, p, m, v]`` or ``[g, p, m, v, master]``: one step of Adam in place (Kingma & Ba 2015; AdamW: Loshchilov & Hutter 2019).

        ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``, ``u = (m / bc1) / (sqrt(v / bc2) + eps)``, ``p -= lr u`` with ``bc = 1 - b^step`` if
        ``bias_correction`` else 1. ``mode`` 0 adds ``weight_decay * p`` to ``g`` (L2), 1 adds it to ``u`` (AdamW). With fp32 ``master`` weights,
        ``p`` is read from them and written to both. ``g`` is left alone, and ``noop_flag`` is not read.
        """
