"""``parallel_cross_entropy``: the loss of logits whose vocabulary may be spread over processes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fusible.compat.triton_functions import cross_entropy as kernels
from fusible.errors import ArgumentError, DTypeError, ShapeError, expected

__all__ = ["parallel_cross_entropy"]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, target: Tensor, smoothing: float, reduce: bool, group: Any, ignored: int, overwrite: bool) -> Tensor:
        loss, saved, stats, target, count, rank, size = kernels.cross_entropy_forward(inp, target, smoothing, reduce, group, ignored, overwrite)
        ctx.save_for_backward(saved.detach(), stats, target, count)
        ctx.rest = smoothing, reduce, rank, size, ignored
        ctx.overwrite, ctx.done = overwrite, False
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.done:
            of, do = "a loss of parallel_cross_entropy, which overwrites what it keeps", "compute the loss again"
            raise ArgumentError(expected("one backward", of=of, got="another", do=do))
        ctx.done = True
        saved, stats, target, count = ctx.saved_tensors
        dx = kernels.cross_entropy_backward(saved, stats, target, count, grads[0], *ctx.rest)
        if ctx.overwrite:
            torch.autograd.graph.increment_version(saved)
        return dx, None, None, None, None, None, None


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    overwrite_input: bool = False,
    _input: Tensor | None = None,
) -> Tensor:
    """The cross entropy of logits ``inp [b, s, v]`` (bf16 or fp32) and ``target`` (int64, one for each row): fp32 ``[b, s]``, or with
    ``reduce_loss`` its mean over the targets other than ``ignore_idx``.

    ``dist_process_group``: each process has ``v`` columns of the vocabulary, by its rank. ``overwrite_input``: backward writes the gradient into
    ``inp``. One backward for each loss. ``is_cg_capturable`` and ``_input`` are former arguments. Raises ``ShapeError``, ``DTypeError``,
    ``ArgumentError``.
    """
    if _input is not None:
        warnings.warn("_input of parallel_cross_entropy is called inp now", FutureWarning, stacklevel=2)
        inp = _input
    if is_cg_capturable:
        warnings.warn("is_cg_capturable of parallel_cross_entropy changes nothing", FutureWarning, stacklevel=2)
    _check(inp, target, label_smoothing, overwrite_input)
    return _CrossEntropy.apply(inp, target, label_smoothing, reduce_loss, dist_process_group, ignore_idx, overwrite_input)  # type: ignore[no-any-return]


def _check(inp: Tensor, target: Tensor, smoothing: float, overwrite: bool) -> None:
    of = "of parallel_cross_entropy"
    if inp.ndim != 3 or not inp.numel():
        raise ShapeError(expected("logits [b, s, v], none of them 0", of=f"inp {of}", got=list(inp.shape), do="reshape them"))
    if inp.dtype not in (torch.bfloat16, torch.float32):
        raise DTypeError(expected("bfloat16 or float32", of=f"inp {of}", got=inp.dtype, do="cast it"))
    if target.dtype != torch.int64:
        raise DTypeError(expected("int64", of=f"target {of}", got=target.dtype, do="cast it"))
    if target.device != inp.device or inp.is_meta:
        got = f"inp on {inp.device}, target on {target.device}"
        raise ArgumentError(expected("logits and targets with data on one device", of="parallel_cross_entropy", got=got, do="move one of them"))
    rows = inp.shape[0] * inp.shape[1]
    if target.numel() != rows:
        raise ShapeError(expected(f"{rows} targets, one for each row", of=f"target {of}", got=target.numel(), do="give one for each"))
    if not 0 <= smoothing <= 1:
        raise ArgumentError(expected("a number from 0 to 1", of=f"label_smoothing {of}", got=smoothing, do="choose another"))
    if overwrite and not inp.is_contiguous():
        raise ArgumentError(expected("contiguous logits", of=f"overwrite_input {of}", got="strided ones", do="pass inp.contiguous()"))
