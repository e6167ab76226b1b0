"""The tensors that attention's torch-facing backends make: outputs, gradients, the state of the random draw; and views of what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusible.errors import ArgumentError, expected
from fusible.tex.calls.attention_layout import QKVLayout

__all__ = ["draw_rng_state", "gradients", "heads_first", "outputs", "seeded"]


def heads_first(x: Tensor, name: str) -> Tensor:
    """A dense tensor as ``[b, h, s, d]``, a view."""
    if name == "SBHD":
        return x.permute(1, 2, 0, 3)
    return x.permute(0, 2, 1, 3) if name == "BSHD" else x


def draw_rng_state(device: torch.device, dropout: float, generator: torch.Generator | None) -> Tensor:
    """``(seed, offset)``; drawn only where dropout needs it."""
    if not dropout:
        return torch.zeros(2, dtype=torch.int64, device=device)
    source = device if generator is None else generator.device
    seed = torch.randint(0, 1 << 62, (1,), dtype=torch.int64, generator=generator, device=source)
    return torch.cat((seed, torch.zeros_like(seed))).to(device)


def seeded(seed: Tensor, offset: int) -> Tensor:
    """The state of the draw of an int64 ``seed [1]``: int64 ``[2]``."""
    return torch.cat((seed, torch.full_like(seed, offset)))


def outputs(
    lay: QKVLayout,
    name: str,
    q: Tensor,
    v: Tensor,
    dense: Callable[..., Tensor] = torch.zeros,
    dtype: torch.dtype | None = None,
    statistics: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """O (of ``dtype``, or Q's), Stats and Max (of ``statistics``): made by ``dense``; but of THD, whose tokens may be of none, 0, 0 and -inf."""
    dtype = q.dtype if dtype is None else dtype
    if lay.q == "THD":
        rows = torch.zeros(*q.shape[:2], 1, dtype=statistics, device=q.device)
        return torch.zeros(*q.shape[:2], v.shape[-1], dtype=dtype, device=q.device), rows, torch.full_like(rows, -torch.inf)
    b, h, s, _ = heads_first(q, lay.q).shape
    d = v.shape[-1]
    shape = {"SBHD": (s, b, h, d), "BSHD": (b, s, h, d), "BHSD": (b, h, s, d)}[name]
    out = dense(shape, dtype=dtype, device=q.device)
    stats, largest = (dense((b, h, s, 1), dtype=statistics, device=q.device) for _ in range(2))
    return out, stats, largest


def gradients(
    to: QKVLayout, lay: QKVLayout, q: Tensor, k: Tensor, v: Tensor, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
) -> tuple[Tensor, Tensor, Tensor]:
    """Zeroed dQ, dK, dV in layout ``to`` of Q, K, V in ``lay``; views of one buffer where they are packed."""
    shapes = [_reordered(x.shape, *names) for x, names in ((q, (lay.q, to.q)), (k, (lay.kv, to.kv)), (v, (lay.kv, to.kv)))]
    last = shapes[3 - to.packed :]
    if any(shape != last[0] for shape in last) or len(set(dtypes[3 - to.packed :])) > 1:
        of = "tensors of a packed layout"
        raise ArgumentError(expected("equal shapes and dtypes", of=of, got=f"{last}", do="use a layout of separate tensors"))
    if to.packed == 1:
        parts = [torch.zeros(shape, dtype=dtype, device=q.device) for shape, dtype in zip(shapes, dtypes, strict=True)]
    else:
        alone = [torch.zeros(shapes[0], dtype=dtypes[0], device=q.device)] if to.packed == 2 else []
        buffer = torch.zeros((*last[0][: to.at], to.packed, *last[0][to.at :]), dtype=dtypes[2], device=q.device)
        parts = [*alone, *buffer.unbind(to.at)]
    return parts[0], parts[1], parts[2]


def _reordered(shape: Sequence[int], name: str, to: str) -> tuple[int, ...]:
    """The shape of a tensor of dimensions ``name`` once they are in the order ``to``; the width is last in both."""
    return tuple(shape[name.index(letter)] for letter in to)
