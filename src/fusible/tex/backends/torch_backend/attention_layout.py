"""How Q, K, V and O lie in memory, and the pieces of a problem that are computed at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusible.errors import ArgumentError, expected
from fusible.tex.enums import NVTE_QKV_Format, NVTE_QKV_Layout

__all__ = ["Layout", "Piece", "empty_in_format", "gradients", "layout", "pieces", "take"]

_FORMATS = {
    NVTE_QKV_Format.NVTE_SBHD: "SBHD",
    NVTE_QKV_Format.NVTE_BSHD: "BSHD",
    NVTE_QKV_Format.NVTE_THD: "THD",
    NVTE_QKV_Format.NVTE_BHSD: "BHSD",
}


@dataclass(frozen=True)
class Layout:
    """The dimension order of Q and of K and V. ``packed`` counts the tensors of the last buffer (1, 2 or 3), stacked at dimension ``at`` of it."""

    q: str
    kv: str
    packed: int = 1
    at: int = 0


def _parse(name: str) -> Layout | None:
    parts = name.removeprefix("NVTE_").split("_")
    if parts[0] in ("Paged", "QKV"):
        return None
    at = next((place for place, letter in enumerate(parts[-1]) if letter.isdigit()), None)
    if at is None:
        return Layout(parts[0], parts[-1])
    kv = parts[-1][:at] + parts[-1][at + 1 :]
    return Layout(parts[0] if len(parts) > 1 else kv, kv, int(parts[-1][at]), at)


_LAYOUTS = {int(member): _parse(name) for name, member in NVTE_QKV_Layout.__members__.items()}


def layout(value: int) -> Layout | None:
    """The layout of an ``NVTE_QKV_Layout``, or None for one that is not served (paged, or not set)."""
    return _LAYOUTS.get(int(value))


def format_name(value: int, default: str) -> str:
    """``SBHD``, ``BSHD``, ``BHSD`` or ``THD``; ``default`` where the format is not set."""
    if int(value) == NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET:
        return default
    name = _FORMATS.get(NVTE_QKV_Format(int(value)))
    if name is None or (name == "THD") != (default == "THD"):
        raise ArgumentError(expected("a format that fits the layout's Q", of="attention outputs", got=value, do=f"pass the format {default}"))
    return name


def empty_in_format(heads_first: Sequence[int], name: str, like: Tensor) -> Tensor:
    """An output of ``[b, h, s, d]`` elements in a dense format."""
    b, h, s, d = heads_first
    shape = {"SBHD": (s, b, h, d), "BSHD": (b, s, h, d), "BHSD": (b, h, s, d)}[name]
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def heads_first(x: Tensor, name: str) -> Tensor:
    """A dense tensor as ``[b, h, s, d]``, a view."""
    if name == "SBHD":
        return x.permute(1, 2, 0, 3)
    return x.permute(0, 2, 1, 3) if name == "BSHD" else x


@dataclass(frozen=True)
class Piece:
    """``count`` sequences from the ``first`` on, of equal lengths in memory; with ``lengths_*`` (``[count]``), only that many tokens count."""

    first: int
    count: int
    sq: int
    skv: int
    start_q: int = 0
    start_kv: int = 0
    lengths_q: Tensor | None = None
    lengths_kv: Tensor | None = None


def take(x: Tensor, name: str, piece: Piece, *, kv: bool) -> Tensor:
    """The piece's part of ``x`` as ``[count, heads, s, d]``, a view."""
    start, length = (piece.start_kv, piece.skv) if kv else (piece.start_q, piece.sq)
    if name == "THD":
        return x[start : start + piece.count * length].unflatten(0, (piece.count, length)).permute(0, 2, 1, 3)
    return heads_first(x, name)[piece.first : piece.first + piece.count, :, :length]


def pieces(
    lay: Layout,
    q: Tensor,
    k: Tensor,
    padding: bool,
    cu_q: Tensor | None,
    cu_kv: Tensor | None,
    padded_q: Tensor | None,
    padded_kv: Tensor | None,
) -> Iterator[Piece]:
    """The pieces of a problem: all sequences at once where they are equally long in memory, else one by one."""
    if lay.q != "THD" and lay.kv != "THD":
        b, _, sq, _ = heads_first(q, lay.q).shape
        skv = heads_first(k, lay.kv).shape[2]
        if padding:
            yield Piece(0, b, sq, skv, lengths_q=torch.diff(_given(cu_q, "q")), lengths_kv=torch.diff(_given(cu_kv, "kv")))
        else:
            yield Piece(0, b, sq, skv)
        return
    starts_q, lengths_q = _sequences(_given(cu_q, "q"), padded_q)
    starts_kv, lengths_kv = _sequences(_given(cu_kv, "kv"), padded_kv)
    count = len(lengths_q)
    if count != len(lengths_kv):
        counts = f"{count} and {len(lengths_kv)}"
        raise ArgumentError(expected("equally many sequences", of="cu_seqlens_q and cu_seqlens_kv", got=counts, do="pass one of each per sequence"))
    if count and _uniform(starts_q, lengths_q) and _uniform(starts_kv, lengths_kv):
        yield Piece(0, count, lengths_q[0], lengths_kv[0], starts_q[0], starts_kv[0])
        return
    for i in range(count):
        yield Piece(i, 1, lengths_q[i], lengths_kv[i], starts_q[i], starts_kv[i])


def _given(cu: Tensor | None, of: str) -> Tensor:
    if cu is None:
        raise ArgumentError(expected("cumulative lengths [b + 1]", of=f"cu_seqlens_{of}", got="None", do="pass them for THD and padding masks"))
    return cu


def _sequences(cu: Tensor, padded: Tensor | None) -> tuple[list[int], list[int]]:
    bounds = cu.tolist()
    starts = bounds[:-1] if padded is None else padded.tolist()[: len(bounds) - 1]
    return starts, [after - before for before, after in zip(bounds, bounds[1:], strict=False)]


def _uniform(starts: list[int], lengths: list[int]) -> bool:
    return len(set(lengths)) == 1 and all(start == starts[0] + i * lengths[0] for i, start in enumerate(starts))


def gradients(lay: Layout, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zeroed dQ, dK, dV of the shapes of Q, K, V (already in ``lay``); views of one buffer where they are packed."""
    if lay.packed == 1:
        return _zeros(q), _zeros(k), _zeros(v)
    if k.shape != v.shape or (lay.packed == 3 and q.shape != k.shape):
        shapes = f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        raise ArgumentError(expected("equal shapes", of="tensors of a packed layout", got=shapes, do="use a layout of separate tensors"))
    buffer = torch.zeros((*k.shape[: lay.at], lay.packed, *k.shape[lay.at :]), dtype=k.dtype, device=k.device)
    parts = buffer.unbind(lay.at)
    return (parts[0], parts[1], parts[2]) if lay.packed == 3 else (_zeros(q), parts[0], parts[1])


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
