"""How Q, K, V and O lie in memory, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusible import lazy
from fusible.errors import ArgumentError, expected
from fusible.lazy import Tensor
from fusible.tex.enums import NVTE_QKV_Format, NVTE_QKV_Layout

__all__ = ["Layout", "format_name", "from_heads_first", "heads_first", "layout"]

_FORMATS = {
    NVTE_QKV_Format.NVTE_SBHD: "SBHD",
    NVTE_QKV_Format.NVTE_BSHD: "BSHD",
    NVTE_QKV_Format.NVTE_THD: "THD",
    NVTE_QKV_Format.NVTE_BHSD: "BHSD",
}
_TO_HEADS_FIRST = {"SBHD": (1, 2, 0, 3), "BSHD": (0, 2, 1, 3), "BHSD": (0, 1, 2, 3)}
_FROM_HEADS_FIRST = {"SBHD": (2, 0, 1, 3), "BSHD": (0, 2, 1, 3), "BHSD": (0, 1, 2, 3)}


@dataclass(frozen=True)
class Layout:
    """The dimension order of Q, and of K and V. Whether a layout packs them does not matter to values."""

    q: str
    kv: str


def _parse(name: str) -> Layout | None:
    parts = name.removeprefix("NVTE_").split("_")
    if parts[0] in ("Paged", "QKV"):
        return None
    orders = ["".join(letter for letter in part if not letter.isdigit()) for part in parts]
    return Layout(orders[0], orders[-1])


_LAYOUTS = {int(member): _parse(name) for name, member in NVTE_QKV_Layout.__members__.items()}


def layout(value: Any) -> Layout | None:
    """The layout of an ``NVTE_QKV_Layout``, or None for one that is not served (paged, or not set)."""
    return _LAYOUTS.get(int(value))


def format_name(value: Any, default: str) -> str:
    """``SBHD``, ``BSHD``, ``BHSD`` or ``THD``; ``default`` where the format is not set."""
    if int(value) == NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET:
        return default
    name = _FORMATS.get(NVTE_QKV_Format(int(value)))
    if name is None or (name == "THD") != (default == "THD"):
        raise ArgumentError(expected("a format that fits the layout's Q", of="attention outputs", got=value, do=f"pass the format {default}"))
    return name


def heads_first(x: Tensor, name: str) -> Tensor:
    """``[b, h, s, d]`` of a tensor in any format; THD is one batch of all its tokens."""
    if name == "THD":
        return lazy.unsqueeze(lazy.permute(x, 1, 0, 2), 0)
    return lazy.permute(x, *_TO_HEADS_FIRST[name])


def from_heads_first(x: Tensor, name: str) -> Tensor:
    """The inverse of ``heads_first``."""
    if name == "THD":
        return lazy.permute(lazy.squeeze(x, 0), 1, 0, 2)
    return lazy.permute(x, *_FROM_HEADS_FIRST[name])
