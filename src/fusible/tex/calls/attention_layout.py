"""The layouts of attention's operands by name: the dimension orders of Q, K and V, and the formats of O, dO and the statistics."""

from __future__ import annotations

from dataclasses import dataclass

from fusible.errors import ArgumentError, NotServedError, expected
from fusible.tex.enums import NVTE_QKV_Format, NVTE_QKV_Layout

__all__ = ["QKVLayout", "format_name", "gradient_layout", "layout"]

_FORMATS: dict[int, str] = {
    NVTE_QKV_Format.NVTE_SBHD: "SBHD",
    NVTE_QKV_Format.NVTE_BSHD: "BSHD",
    NVTE_QKV_Format.NVTE_THD: "THD",
    NVTE_QKV_Format.NVTE_BHSD: "BHSD",
}


@dataclass(frozen=True)
class QKVLayout:
    """The dimension order of Q and of K and V. ``packed`` counts the tensors of the last buffer (1, 2 or 3), stacked at dimension ``at`` of it.

    In a ``paged`` layout K and V are the pages of a cache: their ``B`` counts pages, and their ``S`` the tokens of one.
    """

    q: str
    kv: str
    packed: int = 1
    at: int = 0
    paged: bool = False

    @property
    def statistics(self) -> str:
        """The format of Stats and Max."""
        return "THD" if self.q == "THD" else "BHSD"


def _parse(name: str) -> QKVLayout | None:
    parts = name.removeprefix("NVTE_").split("_")
    if parts[0] == "QKV":
        return None
    if parts[0] == "Paged":
        return QKVLayout(parts[2], parts[3], paged=True)
    at = next((place for place, letter in enumerate(parts[-1]) if letter.isdigit()), None)
    if at is None:
        return QKVLayout(parts[0], parts[-1])
    kv = parts[-1][:at] + parts[-1][at + 1 :]
    return QKVLayout(parts[0] if len(parts) > 1 else kv, kv, int(parts[-1][at]), at)


_LAYOUTS = {int(member): _parse(name) for name, member in NVTE_QKV_Layout.__members__.items()}


def layout(value: int) -> QKVLayout | None:
    """The layout of an ``NVTE_QKV_Layout``, or None where it is not set."""
    return _LAYOUTS.get(int(value))


def gradient_layout(value: int, of: QKVLayout) -> QKVLayout:
    """The layout of the gradients of tensors in layout ``of``: any of as many dimensions. Raises ``NotServedError`` for another.

    Packing and the order of dimensions may differ.
    """
    found = layout(value)
    if found is None or found.paged or len(found.q) != len(of.q) or len(found.kv) != len(of.kv):
        got = NVTE_QKV_Layout(int(value)).name
        raise NotServedError(expected("a layout of qkv_layout's dimensions", of="dqkv_layout", got=got, do="pass qkv_layout, or its packed form"))
    return found


def format_name(value: int, default: str) -> str:
    """``SBHD``, ``BSHD``, ``BHSD`` or ``THD``; ``default`` where the format is not set."""
    if int(value) == NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET:
        return default
    name = _FORMATS.get(int(value))
    if name is None or (name == "THD") != (default == "THD"):
        raise ArgumentError(expected("a format that fits the layout's Q", of="attention outputs", got=value, do=f"pass the format {default}"))
    return name
