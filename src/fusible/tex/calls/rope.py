"""What the rotary embeddings read of their arguments: where sequences start, and Q and K within one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.errors import ArgumentError, ShapeError, expected
from fusible.tex.enums import NVTE_QKV_Format
from fusible.tex.protocol import TensorLike

__all__ = ["check_qkv_rope", "check_qkv_rope_gradients", "starts_of"]


def starts_of(x: TensorLike, start: Any, qkv_format: int, cu_seqlens: Any) -> Any:
    """The start positions of the sequences that ``x`` has; NVIDIA's package gives those of the largest batch that a cache has room for."""
    if start is None:
        return None
    if qkv_format == NVTE_QKV_Format.NVTE_THD:
        return start[: cu_seqlens.shape[0] - 1]
    return start[: x.shape[1 if qkv_format == NVTE_QKV_Format.NVTE_SBHD else 0]]


def check_qkv_rope(qkv: TensorLike, split: Sequence[int], qkv_format: int, function: str) -> tuple[int, int, int]:
    """``(dq, dk, dv)`` of a call that fits. Raises for one that does not (``interface.rope.Rope.fused_qkv_rope_forward``)."""
    widths = _widths(split, qkv_format, function)
    if qkv.ndim != 4 or qkv.shape[-1] != sum(widths):
        raise ShapeError(expected(f"4 dimensions, the last {sum(widths)}", of=f"qkv_input of {function}", got=list(qkv.shape), do="reshape it"))
    return widths


def check_qkv_rope_gradients(grads: Sequence[Any], split: Sequence[int], qkv_format: int, function: str) -> tuple[int, int, int]:
    """``(dq, dk, dv)`` of gradients of q, k, v that fit one another."""
    dq, dk, dv = _widths(split, qkv_format, function)
    shapes = [tuple(g.shape) for g in grads]
    leading = shapes[2][:-1]
    wanted = [(*leading[:-1], leading[-1] * dq // dk, dk), (*leading, dk), (*leading, dv)] if len(leading) == 3 else None
    if shapes != wanted:
        of = f"q_grad_out, k_grad_out and v_grad_out of {function}"
        raise ShapeError(expected("[.., h dq / dk, dk], [.., h, dk], [.., h, dv]", of=of, got=shapes, do="reshape them"))
    return dq, dk, dv


def _widths(split: Sequence[int], qkv_format: int, function: str) -> tuple[int, int, int]:
    if int(qkv_format) not in (NVTE_QKV_Format.NVTE_SBHD, NVTE_QKV_Format.NVTE_BSHD):
        raise ArgumentError(expected("SBHD or BSHD", of=f"qkv_format of {function}", got=qkv_format, do="pass one of the two"))
    widths = [int(width) for width in split]
    if len(widths) != 3 or min(widths) <= 0 or widths[0] % widths[2] or widths[1] % widths[2] or widths[0] % widths[1]:
        wanted = "[dq, dk, dv], dq a multiple of dk and both of dv"
        raise ShapeError(expected(wanted, of=f"qkv_split_arg_list of {function}", got=widths, do="pass the widths of one group"))
    return widths[0], widths[1], widths[2]
