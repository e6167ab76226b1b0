"""The words in which a declaration says of which dtype and shape an argument is: ``"fp32 [m]"``, ``"float [* n]"``, ``"n * int32 [b+1]"``.

First a dtype, or several joined by ``|``: ``fp32 fp64 bf16 fp16 int16 int32 int64 uint8 bool``, ``float`` (fp32, bf16 or fp16), ``real`` (one of
those or fp64), ``integer`` (int32 or int64), ``byte`` (any of one byte but bool, which holds two of the 256), ``any``, or ``=x``, that of the
argument ``x``. Then the dimensions in brackets: a number, ``_`` for any, a name that stands for the same size wherever it occurs (an argument's name
for its value), and ``2*n``, ``n/2`` or ``n+1`` of one, with ``>`` before it for that and more, where the rest is not read; one ``*`` for any number
of dimensions, ``*m`` for such whose product is m. ``(n)`` in place of brackets asks for n elements in whatever shape. ``n *`` before it all says that
the argument is a list of n such values; the names of sizes are then each item's own.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = ["LayoutOf", "layout_of_text"]

_FLOATING = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "fp32": (torch.float32,),
    "fp64": (torch.float64,),
    "bf16": (torch.bfloat16,),
    "fp16": (torch.float16,),
    "float": _FLOATING,
    "real": (*_FLOATING, torch.float64),
    "int16": (torch.int16,),
    "int32": (torch.int32,),
    "int64": (torch.int64,),
    "integer": (torch.int32, torch.int64),
    "uint8": (torch.uint8,),
    "bool": (torch.bool,),
}
_TEXT = re.compile(r"(?:(\w+) \* )?(\S+)(?: ([\[(])(.*)[\])])?")
_SIZE = re.compile(r"(?:(\d+)\*)?(\w+)(?:([+/])(\d+))?")


@dataclass(frozen=True)
class LayoutOf:
    """A parsed text: the list's length by name, the dtypes, and the dimensions, or ``elements`` of any shape; None where it says nothing."""

    count: str | None
    dtypes: tuple[str, ...]
    dims: tuple[str, ...] | None
    elements: str | None

    def wrong_dtype(self, dtype: torch.dtype | None, others: Mapping[str, torch.dtype | None]) -> str:
        """What was expected instead of ``dtype``, or nothing; ``others`` are those of the other arguments."""
        allowed: list[torch.dtype] = []
        for word in self.dtypes:
            if word == "any" or dtype is None:
                return ""
            if word.startswith("="):
                other = others.get(word[1:])
                if other is None:
                    return ""
                allowed.append(other)
            elif word == "byte":
                if dtype.itemsize == 1 and dtype is not torch.bool:
                    return ""
                allowed.append(torch.uint8)
            else:
                allowed += _DTYPES[word]
        if dtype in allowed:
            return ""
        names = [str(one).removeprefix("torch.") for one in allowed]
        return f"a tensor of {', '.join(names[:-1])}{' or ' if names[1:] else ''}{names[-1]}"

    def wrong_shape(self, shape: tuple[int, ...], sizes: dict[str, int], numbers: Mapping[str, int]) -> str:
        """The shape that was expected instead of ``shape``, or nothing. Sizes that are seen for the first time enter ``sizes``."""
        if self.elements is not None:
            fits = _size(self.elements, math.prod(shape), sizes, numbers)
            return "" if fits else f"[{_shown(self.elements, sizes, numbers)}]"
        if self.dims is None:
            return ""
        star = next((i for i, dim in enumerate(self.dims) if dim.startswith("*")), None)
        before, after = (self.dims, ()) if star is None else (self.dims[:star], self.dims[star + 1 :])
        fits = len(shape) == len(before) if star is None else len(shape) >= len(before) + len(after)
        if fits:
            end = len(shape) - len(after)
            pairs = [*zip(before, shape, strict=False), *zip(after, shape[end:], strict=True)]
            if star is not None and self.dims[star] != "*":
                pairs.insert(0, (self.dims[star][1:], math.prod(shape[len(before) : end])))
            fits = all([_size(dim, size, sizes, numbers) for dim, size in pairs])
        return "" if fits else f"[{', '.join('...' if dim == '*' else _shown(dim, sizes, numbers) for dim in self.dims)}]"


def _size(text: str, size: int, sizes: dict[str, int], numbers: Mapping[str, int]) -> bool:
    """Whether ``size`` is what ``text`` stands for; a name that is new stands for ``size`` from now on."""
    if text.startswith(">"):
        least = _value(text[1:], sizes, numbers)
        return least is None or size >= least
    wanted = _value(text, sizes, numbers)
    if wanted is None:
        if text.isidentifier() and text != "_":
            sizes[text] = size
        factor, _, sign, _ = _SIZE.fullmatch(text).groups()  # pyright: ignore[reportOptionalMemberAccess]
        return size % int(factor or 1) == 0 and (sign != "+" or size > 0)
    return wanted == size


def _value(text: str, sizes: Mapping[str, int], numbers: Mapping[str, int]) -> int | None:
    parts = _SIZE.fullmatch(text)
    assert parts is not None, f"{text!r} is no size"
    factor, name, sign, other = parts.groups()
    base = int(name) if name.isdigit() else sizes.get(name, numbers.get(name))
    if base is None or name == "_":
        return None
    base *= int(factor or 1)
    return base + int(other) if sign == "+" else base // int(other) if sign == "/" else base


def _shown(text: str, sizes: Mapping[str, int], numbers: Mapping[str, int]) -> str:
    value = _value(text.lstrip("*>"), sizes, numbers)
    return text if value is None else f"{value}{' or more' if text.startswith('>') else ''}"


@functools.cache
def layout_of_text(text: str) -> LayoutOf:
    """The layout that a declaration's text says."""
    parts = _TEXT.fullmatch(text)
    assert parts is not None, f"{text!r} is no dtype with a shape"
    count, dtypes, bracket, dims = parts.groups()
    unknown = [word for word in dtypes.split("|") if word not in _DTYPES and word not in ("any", "byte") and not word.startswith("=")]
    assert not unknown, f"{unknown} are no dtypes"
    inside = dims if bracket == "(" else None
    return LayoutOf(count, tuple(dtypes.split("|")), tuple(dims.split()) if bracket == "[" else None, inside)
