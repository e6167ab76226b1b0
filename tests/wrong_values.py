"""Wrong values to put in the place of right ones, and what a call may have changed: for sweeps of bad calls."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["SIZES", "Strange", "changed", "others", "state", "words"]

OTHER_DTYPES = (torch.int64, torch.float64, torch.uint8, torch.bool, torch.complex64, torch.int8, torch.float32)

SIZES = (
    "0-d", "empty", "one rank more", "flat", "longer", "shorter", "wider", "meta", "longer list", "shorter list", "empty list", "strided",
    "-1", "99", "a large number",
)  # fmt: skip
"""Substitutions that are wrong by their size or place: sizes of several arguments belong together."""


class Strange:
    """Of no class that tex knows."""


def _tensors(x: torch.Tensor) -> Iterator[tuple[str, Any]]:
    for dtype in OTHER_DTYPES:
        if dtype is not x.dtype:
            yield f"of {str(dtype)[6:]}", torch.ones(x.shape, dtype=dtype)
    yield "0-d", torch.ones((), dtype=x.dtype)
    yield "empty", torch.empty((0, *x.shape[1:]), dtype=x.dtype)
    yield "one rank more", x.detach()[None]
    yield "flat", x.detach().reshape(-1)
    if x.ndim:
        yield "longer", torch.cat([x.detach(), x.detach()[:1]]) if x.shape[0] else torch.ones((3, *x.shape[1:])).to(x.dtype)
        if x.shape[0] > 1:
            yield "shorter", x.detach()[:-1]
        yield "wider", torch.ones((*x.shape[:-1], x.shape[-1] + 1)).to(x.dtype)
    yield "meta", x.detach().to("meta")
    if x.layout is torch.strided and x.ndim:
        yield "sparse", x.detach().to_sparse()
    if x.ndim and x.numel():
        spread = torch.empty((*x.shape, 2), dtype=x.dtype)[..., 0]
        spread.copy_(x.detach())
        yield "strided", spread


def others(value: Any) -> Iterator[tuple[str, Any]]:
    """Wrong values in place of ``value``, and what each is."""
    if value is not None:
        yield "None", None
    yield "an object", Strange()
    yield "a text", "bogus"
    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter):
        yield "3", 3
        yield "2.5", 2.5
        yield "a list", [value]
        yield from _tensors(value)
    elif isinstance(value, list | tuple):
        yield "3", 3
        yield "empty list", []
        yield "longer list", [*value, *value[:1]]
        if len(value) > 1:
            yield "shorter list", list(value[:-1])
        for name, item in (("None", None), ("a number", 2.5), ("a text", "bogus"), ("an object", Strange())):
            if value and not (item is None and value[0] is None):
                yield f"a list with {name}", [item, *value[1:]]
        yield "nested list", [list(value)]
        if value and isinstance(value[0], torch.Tensor) and type(value[0]) in (torch.Tensor, torch.nn.Parameter):
            for name, item in _tensors(value[0]):
                yield f"first {name}", [item, *value[1:]]
        elif value and isinstance(value[0], list | tuple):
            for name, item in others(value[0]):
                yield f"first {name}", [item, *value[1:]]
        elif value and isinstance(value[0], int) and not isinstance(value[0], bool):
            yield "a list with -1", [-1, *value[1:]]
            yield "a list with a large number", [value[0] + 1000, *value[1:]]
    elif isinstance(value, bool):
        yield "a tensor", torch.ones(2)
        yield "a list", [True]
    elif isinstance(value, int):
        yield "2.5", 2.5
        yield "a tensor", torch.ones(2)
        yield "a list", [value]
        yield "-1", -1
        yield "99", 99
    elif isinstance(value, float):
        yield "a tensor", torch.ones(2)
        yield "a list", [value]
    elif value is None:
        yield "3", 3
        yield "a tensor", torch.ones(3, 5)
        yield "a list", [3]
    else:
        yield "3", 3
        yield "99", 99
        yield "a tensor", torch.ones(2)
        yield "a list", [value]


def state(x: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Whatever can be written in ``x``, as values that can be compared."""
    seen = set() if seen is None else seen
    if id(x) in seen:
        return
    if isinstance(x, torch.Tensor) and type(x) in (torch.Tensor, torch.nn.Parameter):
        if x.device.type == "cpu" and x.layout is torch.strided:
            yield x.detach().clone()
    elif isinstance(x, dict):
        for value in x.values():
            yield from state(value, seen)
    elif isinstance(x, list | tuple):
        yield len(x)
        for value in x:
            yield from state(value, seen)
    elif hasattr(x, "__dict__") and type(x).__module__.startswith("fusible."):
        seen.add(id(x))
        for name, value in sorted(vars(x).items()):
            if isinstance(getattr(type(x), name, None), functools.cached_property):
                continue  # computed of the rest, whenever it is first asked for
            yield name
            yield from state(value, seen)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
    return type(a) is type(b) and a == b


def changed(before: list[Any], after: list[Any]) -> bool:
    """Whether two results of ``state`` differ."""
    return len(before) != len(after) or not all(map(_same, before, after))


def words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_][A-Za-z_0-9]*", text))
