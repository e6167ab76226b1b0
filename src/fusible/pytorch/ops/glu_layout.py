"""How the two halves of a gated layer's weight lie: whole, or alternating in blocks, as gated activations with ``glu_interleave_size`` read them."""

from __future__ import annotations

import torch

from fusible.errors import ArgumentError, ShapeError, expected

__all__ = ["deinterleave_glu_tensor", "interleave_glu_tensor"]


def interleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """``[a; b]`` -> ``[a[:n]; b[:n]; a[n:2n]; b[n:2n]; ...]`` with ``n = interleave_size``, along the first dimension.

    ``tensor [2 m, ...]`` is the weight or the bias of the layer before the activation, ``m`` a multiple of n. Raises ``ArgumentError``,
    ``ShapeError``.
    """
    _check(tensor, interleave_size)
    blocks = tensor.reshape(2, -1, interleave_size, *tensor.shape[1:])
    return blocks.transpose(0, 1).reshape(tensor.shape)


def deinterleave_glu_tensor(tensor: torch.Tensor, interleave_size: int) -> torch.Tensor:
    """The inverse of ``interleave_glu_tensor``."""
    _check(tensor, interleave_size)
    blocks = tensor.reshape(-1, 2, interleave_size, *tensor.shape[1:])
    return blocks.transpose(0, 1).reshape(tensor.shape)


def _check(tensor: torch.Tensor, interleave_size: int) -> None:
    if interleave_size < 1:
        raise ArgumentError(expected("at least 1", of="interleave_size", got=interleave_size, do="give the length of a block"))
    if tensor.dim() == 0 or tensor.shape[0] % (2 * interleave_size):
        do = "give both halves, in whole blocks"
        what = f"a multiple of {2 * interleave_size} rows"
        raise ShapeError(expected(what, of="a gated layer's weight", got=list(tensor.shape), do=do))
