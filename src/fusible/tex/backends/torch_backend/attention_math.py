"""The arithmetic of attention on one piece: ``q [n, h, s, d]``, ``k [n, g, t, d]``, ``v [n, g, t, e]``, wide throughout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusible.errors import ShapeError, expected
from fusible.tex.backends.torch_backend.attention_fp8 import Amax
from fusible.tex.backends.torch_backend.attention_pieces import Piece
from fusible.tex.backends.torch_backend.operands import wide
from fusible.tex.backends.torch_backend.random import drop_threshold, words
from fusible.tex.calls.attention import BOTTOM_RIGHT, CAUSAL, ScoreRules
from fusible.tex.enums import NVTE_Softmax_Type

__all__ = ["Scores", "backward", "forward"]


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

    def extra_logit(self) -> Tensor | None:
        """The logit of the denominator's extra term, broadcastable to ``[n, h, s, 1]``."""
        if self.softmax == NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX:
            return torch.zeros(1, 1, 1, 1, dtype=torch.float32, device=self.rng_state.device)
        return None if self.offset is None else wide(self.offset).view(1, -1, 1, 1)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """``[n, h, s, d] -> [n, g, h / g * s, d]``: the queries of a kv head, one after the other."""
    n, h, s, d = x.shape
    return x.reshape(n, groups, h // groups * s, d)


def _scores(sc: Scores, piece: Piece, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
    """The scores, and where they are capped the derivative of the cap."""
    n, h, s, _ = q.shape
    slope: Tensor | None = None
    scores = torch.matmul(_grouped(q, k.shape[1]), k.transpose(-1, -2)).view(n, h, s, k.shape[2])
    if sc.bias is not None and sc.pre_scale:
        scores.add_(sc.bias_of(piece, sc.bias))
    scores.mul_(sc.scale)
    if sc.soft_cap is not None:
        share = scores.div_(sc.soft_cap).tanh_()
        slope = 1 - share.square()
        scores = share.mul_(sc.soft_cap)
    if sc.bias is not None and not sc.pre_scale:
        scores.add_(sc.bias_of(piece, sc.bias))
    if sc.slopes is not None:
        slopes = torch.tensor(sc.slopes, dtype=q.dtype, device=q.device).view(-1, 1, 1)
        scores.addcmul_(slopes, _distances(sc, piece, q.device), value=-1)
    visible = _visible(sc, piece, q.device)
    return scores if visible is None else scores.masked_fill_(visible.logical_not_(), -torch.inf), slope


def _rows(piece: Piece, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """The positions of the piece's queries, ``[rows, 1]``."""
    return torch.arange(piece.row, piece.row + piece.rows, device=device, dtype=dtype).view(-1, 1)


def _end_offset(piece: Piece) -> Tensor | int:
    """How far the last key is ahead of the last query."""
    if piece.lengths_q is None or piece.lengths_kv is None:
        return piece.skv - piece.sq
    return (piece.lengths_kv - piece.lengths_q).view(-1, 1, 1, 1)


def _distances(sc: Scores, piece: Piece, device: torch.device) -> Tensor:
    """``|i + off - j|`` of query i and key j, broadcastable to ``[n, h, s, t]``, for ALiBi."""
    diagonal = _rows(piece, device, torch.float32)
    if sc.bottom_right_diagonal:
        diagonal = diagonal + _end_offset(piece)
    return (diagonal - torch.arange(piece.skv, device=device, dtype=torch.float32)).abs_()


def _visible(sc: Scores, piece: Piece, device: torch.device) -> Tensor | None:
    """Which keys each query sees, a new tensor broadcastable to ``[n, h, s, t]``; None where all see all."""
    i = _rows(piece, device)
    j = torch.arange(piece.skv, device=device)
    end_offset = _end_offset(piece)
    found: list[Tensor] = []
    if piece.lengths_q is not None and piece.lengths_kv is not None:
        found.append((i < piece.lengths_q.view(-1, 1, 1, 1)).logical_and(j < piece.lengths_kv.view(-1, 1, 1, 1)))
    if sc.mask in CAUSAL:
        found.append(j <= i + (end_offset if sc.mask in BOTTOM_RIGHT else 0))
    left, right = sc.window
    diagonal = i + (end_offset if sc.bottom_right_diagonal else 0)
    if left >= 0:
        found.append(j >= diagonal - left)
    if right >= 0:
        found.append(j <= diagonal + right)
    if not found:
        return None
    visible = found[0]
    for other in found[1:]:
        visible = visible & other
    return visible


def _kept(sc: Scores, piece: Piece, heads: int, dtype: torch.dtype) -> Tensor | None:
    """The dropout mask times ``1 / (1 - p)``, or None without dropout."""
    if not sc.dropout:
        return None
    device = sc.rng_state.device
    batch = torch.arange(piece.first, piece.first + piece.count, device=device).view(-1, 1, 1, 1)
    head = torch.arange(heads, device=device).view(-1, 1, 1)
    element = ((batch * heads + head) * sc.max_sq + _rows(piece, device)) * sc.max_skv + torch.arange(piece.skv, device=device)
    drawn = words(sc.rng_state[:1], element.add_(sc.rng_state[1:] << 40))
    return (drawn >= drop_threshold(sc.dropout)).to(dtype).mul_(1 / (1 - sc.dropout))


def forward(sc: Scores, piece: Piece, q: Tensor, k: Tensor, v: Tensor, seen: Amax) -> tuple[Tensor, Tensor, Tensor]:
    """``(o [n, h, s, e], stats [n, h, s, 1], largest [n, h, s, 1])``; ``seen`` sees the probabilities that V is multiplied by."""
    q = wide(q)
    n, h, s, _ = q.shape
    if not piece.skv:
        nothing = torch.full((n, h, s, 1), -torch.inf, dtype=q.dtype, device=q.device)
        extra = sc.extra_logit()
        stats = nothing if extra is None else extra.expand_as(nothing)
        return torch.zeros(n, h, s, v.shape[3], dtype=q.dtype, device=q.device), stats, nothing
    p, _ = _scores(sc, piece, q, k)
    largest = p.amax(-1, keepdim=True)
    extra = sc.extra_logit()
    base = largest if extra is None else torch.maximum(largest, extra)
    base = base.masked_fill(base == -torch.inf, 0)
    p = p.sub_(base).exp_()
    total = p.sum(-1, keepdim=True)
    if extra is not None:
        total.add_((extra - base).exp_())
    stats = torch.log(total).add_(base)
    p.div_(total.masked_fill_(total == 0, 1))
    kept = _kept(sc, piece, h, q.dtype)
    if kept is not None:
        p.mul_(kept)
    seen.see(p)
    return torch.matmul(_grouped(p, k.shape[1]), v).view(n, h, s, v.shape[3]), stats, largest


@dataclass
class Gradients:
    """What backward gives for one piece: of Q, K, V, the scores (once a bias is added), and the extra logit (per query, where there is one)."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    extra: Tensor | None


def backward(sc: Scores, piece: Piece, operands: tuple[Tensor, Tensor, Tensor], o: Tensor, do: Tensor, stats: Tensor, seen: Amax) -> Gradients:
    """The gradients of one piece that has keys, of ``operands`` Q, K, V; ``seen`` sees the gradients of the scores."""
    q, k, v = operands
    q, do = wide(q), wide(do)
    groups, h = k.shape[1], q.shape[1]
    extra = sc.extra_logit()
    stats = stats.masked_fill(stats == -torch.inf, 0)
    p, slope = _scores(sc, piece, q, k)
    p = p.sub_(stats).exp_()
    kept = _kept(sc, piece, h, q.dtype)
    dropped = p if kept is None else p * kept
    do_grouped = _grouped(do, groups)
    dv = torch.matmul(_grouped(dropped, groups).transpose(-1, -2), do_grouped)
    del dropped
    ds = torch.matmul(do_grouped, v.transpose(-1, -2)).view(p.shape)
    if kept is not None:
        ds.mul_(kept)
    delta = (do * o).sum(-1, keepdim=True)
    ds.sub_(delta).mul_(p)
    seen.see(ds)
    grouped = _grouped(ds if slope is None else slope.mul_(ds), groups)
    dq = torch.matmul(grouped, k).view(q.shape).mul_(sc.scale)
    dk = torch.matmul(grouped.transpose(-1, -2), _grouped(q, groups)).mul_(sc.scale)
    return Gradients(dq, dk, dv, ds, None if extra is None else (extra - stats).exp_().mul_(delta).neg_())
