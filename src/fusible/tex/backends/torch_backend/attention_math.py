"""Attention on one piece of a problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusible.errors import ShapeError, expected
from fusible.tex.backends.torch_backend.arrays import TORCH
from fusible.tex.backends.torch_backend.attention_fp8 import Amax
from fusible.tex.backends.torch_backend.attention_pieces import Piece
from fusible.tex.backends.torch_backend.operands import wide
from fusible.tex.backends.torch_backend.random import words
from fusible.tex.calls.attention import ScoreRules
from fusible.tex.formulas.attention import AttentionMath, Gradients, Part, Tokens

__all__ = ["Scores", "backward", "forward"]


def _product(a: Tensor, b: Tensor, left: int, right: int) -> Tensor:
    return torch.matmul(a if left == 3 else a.transpose(-1, -2), b if right == 2 else b.transpose(-1, -2))


_MATH = AttentionMath(
    arrays=TORCH,
    product=_product,
    constant=lambda numbers, shape, like: torch.tensor(numbers, dtype=like.dtype, device=like.device).view(shape),
    counter=torch.int64,
    words=words,
)


@dataclass(frozen=True)
class Scores(ScoreRules[Tensor]):
    """What turns Q and K into probabilities, for one piece at a time."""

    def bias_of(self, piece: Piece, bias: Tensor) -> Tensor:
        """The part of a tensor of the bias's shape that belongs to a piece."""
        batch = bias if bias.shape[0] == 1 else bias[piece.first : piece.first + piece.count]
        rows = batch if bias.shape[2] == 1 else batch[:, :, piece.row : piece.row + piece.rows]
        found = rows[..., : piece.skv]
        if found.shape[0] not in (1, piece.count) or found.shape[2] not in (1, piece.rows) or found.shape[3] not in (1, piece.skv):
            wanted = f"scores of {piece.first + piece.count} sequences, {piece.row + piece.rows} queries and {piece.skv} keys"
            raise ShapeError(expected(wanted, of="Bias of attention", got=list(bias.shape), do="pass one for the longest sequences"))
        return found

    def part(self, piece: Piece, device: torch.device) -> Part:
        i = torch.arange(piece.row, piece.row + piece.rows, device=device).view(-1, 1)
        j = torch.arange(piece.skv, device=device)
        batch = torch.arange(piece.first, piece.first + piece.count, device=device).view(-1, 1, 1, 1) if self.dropout else None
        if piece.lengths_q is None or piece.lengths_kv is None:
            queries, keys = Tokens(batch, i, piece.sq, None, packed=False), Tokens(batch, j, piece.skv, None, packed=False)
        else:
            sq, skv = piece.lengths_q.view(-1, 1, 1, 1), piece.lengths_kv.view(-1, 1, 1, 1)
            queries, keys = Tokens(batch, i, sq, i < sq, packed=False), Tokens(batch, j, skv, j < skv, packed=False)
        return Part(self, queries, keys, None if self.bias is None else self.bias_of(piece, self.bias))


def forward(sc: Scores, piece: Piece, q: Tensor, k: Tensor, v: Tensor, seen: Amax) -> tuple[Tensor, Tensor, Tensor]:
    """``(o [n, h, s, e], stats [n, h, s, 1], largest [n, h, s, 1])``; ``seen`` sees the probabilities that V is multiplied by."""
    q = wide(q)
    if piece.skv:
        return _MATH.forward(sc.part(piece, q.device), q, k, v, seen.see)
    n, h, s, _ = q.shape
    nothing = torch.full((n, h, s, 1), -torch.inf, dtype=q.dtype, device=q.device)
    extra = _MATH.extra_logit(sc)
    stats = nothing if extra is None else extra.expand_as(nothing)
    return torch.zeros(n, h, s, v.shape[3], dtype=q.dtype, device=q.device), stats, nothing


def backward(sc: Scores, piece: Piece, operands: tuple[Tensor, Tensor, Tensor], o: Tensor, do: Tensor, stats: Tensor, seen: Amax) -> Gradients:
    """The gradients of one piece that has keys, of ``operands`` Q, K, V; ``seen`` sees the gradients of the scores."""
    q, k, v = operands
    return _MATH.backward(sc.part(piece, q.device), wide(q), k, v, o, wide(do), stats, seen.see)
