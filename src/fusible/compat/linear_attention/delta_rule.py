"""The gated delta rule: a linear recurrence whose state forgets, corrects what it has for a key, and is read by queries."""

from __future__ import annotations

import torch

__all__ = ["delta_rule"]

_CHUNK, _CHANNEL_CHUNK = 64, 16
"""Updates that are computed together: by a gate for all channels, and by one for each, where every pair of updates has factors of its own."""


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, erase: torch.Tensor, write: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of n updates ``S <- diag(exp(decay)) S``, then ``S <- S - k (erase^T S - write^T)``; ``o = q^T S`` after every ``n / t`` of them.

    ``q [b, h, t, d]``, ``k, erase [b, h, n, d]``, ``write [b, h, n, e]``, ``decay [b, h, n, 1]`` or ``[b, h, n, d]``, not positive, ``state [b, h, d,
    e]``, all of one type. Gives ``o [b, h, t, e]`` and the last state. Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) has ``erase = beta k`` and
    ``write = beta v``; an update with ``k = 0`` and ``decay = 0`` changes nothing.

    The updates of a chunk are one triangular system (the WY form of DeltaNet, Yang et al. 2024, arXiv:2406.06484). Decays enter as exponentials of
    differences that are never positive, so that nothing overflows, however strong they are.
    """
    updates = k.shape[2] // max(q.shape[2], 1) or 1
    tokens = max(1, (_CHUNK if decay.shape[-1] == 1 else _CHANNEL_CHUNK) // updates)
    outputs = []
    for start in range(0, q.shape[2], tokens):
        rows = slice(start * updates, (start + tokens) * updates)
        of_keys, of_erased, of_written, decays = (x[:, :, rows] for x in (k, erase, write, decay))
        o, state = _chunk(q[:, :, start : start + tokens], of_keys, of_erased, of_written, decays, state, updates)
        outputs.append(o)
    return torch.cat(outputs, 2) if outputs else q.new_zeros(*q.shape[:3], write.shape[-1]), state


def _chunk(
    q: torch.Tensor, k: torch.Tensor, erase: torch.Tensor, write: torch.Tensor, decay: torch.Tensor, state: torch.Tensor, updates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """With ``G`` the decays summed up to a row, and ``x_j`` what row j adds along ``k_j``: ``S_i = exp(G_i) S_0 + sum_{j <= i} exp(G_i - G_j) k_j
    x_j^T``, where ``x_j = write_j - S'_j^T erase_j`` for the state ``S'_j`` before row j's correction, a sum over the rows before it."""
    total = decay.cumsum(2)
    rows = torch.arange(k.shape[2], device=k.device)
    read = rows[updates - 1 :: updates]
    before = _weights(erase, total, k, total, rows[:, None] > rows)
    added = torch.linalg.solve_triangular(before, write - (erase * total.exp()) @ state, upper=False, unitriangular=True)  # of before + 1
    of_queries = total[:, :, read]
    o = (q * of_queries.exp()) @ state + _weights(q, of_queries, k, total, read[:, None] >= rows) @ added
    last = total[:, :, -1:]
    return o, last.exp().mT * state + (k * (last - total).exp()).mT @ added


def _weights(a: torch.Tensor, of_a: torch.Tensor, k: torch.Tensor, of_k: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """``sum_d a_id exp(G_id - G_jd) k_jd`` where row i sees row j, else 0. What is not seen is masked before the exponential: it might overflow."""
    if of_k.shape[-1] == 1:
        return (a @ k.mT) * (of_a - of_k.mT).masked_fill(~seen, -torch.inf).exp()
    factors = (of_a.unsqueeze(3) - of_k.unsqueeze(2)).masked_fill(~seen[..., None], -torch.inf).exp()
    return torch.einsum("bhid,bhijd,bhjd->bhij", a, factors, k)
