"""Amounts of memory: as command lines say them, and as keys and values take them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fusible.errors import ArgumentError, expected

__all__ = ["bytes_per_token", "pages_within", "parse_size"]

_UNITS = {unit: 1000**power for power, unit in enumerate(("", "k", "m", "g", "t"))}
_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate(("", "k", "m", "g", "t")) if unit}


def parse_size(text: str, of: str) -> int:
    """Bytes, of e.g. ``"24GiB"``, ``"800 MB"`` or ``"1e9"``. Raises ``ArgumentError`` for anything else, and for less than one."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)(?:e(\d))?\s*([kmgt]i?)?b?", text.strip().lower())
    size = int(float(match[1]) * 10 ** int(match[2] or 0) * _UNITS[match[3] or ""]) if match else 0
    if size < 1:
        raise ArgumentError(expected("an amount of memory", of=of, got=repr(text), do="give e.g. 24GiB"))
    return size


def bytes_per_token(config: Mapping[str, Any], itemsize: int) -> int | None:
    """What the keys and values of a token take in all layers, by ``config.json``; None where it does not tell.

    Layers that keep less (of a sliding window, or none at all) are counted as if they kept all: the estimate is never too small.
    """
    text = config.get("text_config")
    of_text = text if isinstance(text, Mapping) else config

    def number(*names: str) -> int | None:
        return next((value for name in names if isinstance(value := of_text.get(name), int) and value > 0), None)

    layers, heads = number("num_hidden_layers", "n_layer"), number("num_attention_heads", "n_head")
    hidden = number("hidden_size", "n_embd")
    if layers is None or heads is None or hidden is None:
        return None
    groups, width = number("num_key_value_heads") or heads, number("head_dim") or hidden // heads
    return 2 * layers * groups * width * itemsize


def pages_within(memory: int, token_bytes: int, *, sequences: int, capacity: int, page_size: int) -> int:
    """How many pages for ``sequences`` of ``capacity`` tokens fit in ``memory`` bytes; all of them, where they do. Raises ``ArgumentError`` where
    not even one sequence has room."""
    each = -(-capacity // page_size)
    there = memory // (token_bytes * page_size)
    if there < each:
        needed = f"{each * page_size * token_bytes / 2**30:.2f} GiB for the keys and values of {capacity} tokens"
        got = f"{max(0, memory) / 2**30:.2f} GiB beside the weights"
        raise ArgumentError(expected(needed, of="the memory", got=got, do="give more memory, or ask for fewer tokens"))
    return min(there, sequences * each)
