"""Bad calls of tex, made from the good ones of the conformance table: each argument in turn is replaced by each kind of wrong value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from fusible import tex
from fusible.conformance.table import Disagreement, Record, Sample, check
from fusible.errors import FusibleError

__all__ = ["BadCall", "Outcome", "bad_calls", "clear", "outcome"]

OTHER_DTYPES = (torch.int64, torch.float64, torch.uint8, torch.bool, torch.complex64, torch.int8, torch.float32)


SIZES = (
    "0-d", "empty", "one rank more", "flat", "longer", "shorter", "wider", "meta", "longer list", "shorter list", "empty list", "strided",
    "-1", "99", "a large number",
)  # fmt: skip
"""Substitutions that are wrong by their size or place: sizes of several arguments belong together."""


@dataclass(frozen=True)
class BadCall:
    """A good call with one argument replaced; ``what`` says by what."""

    function: str
    argument: str
    what: str
    arguments: dict[str, Any]
    sample: Sample = field(repr=False)
    relative: bool = False
    """Whether the value is wrong only beside the other arguments: a sentence may then name one of these."""

    def __str__(self) -> str:
        return f"{self.function}: {self.argument} {self.what}"


@dataclass(frozen=True)
class Outcome:
    """``kind``: "accepted", "clear", or what is wrong with the refusal."""

    kind: str
    text: str = ""


class _Strange:
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
        yield "sparse", torch.zeros(x.shape).to_sparse()
    if x.ndim and x.numel():
        spread = torch.empty((*x.shape, 2), dtype=x.dtype)[..., 0]
        spread.copy_(x.detach())
        yield "strided", spread


def _others(value: Any) -> Iterator[tuple[str, Any]]:
    """Wrong values in place of ``value``, and what each is."""
    if value is not None:
        yield "None", None
    yield "an object", _Strange()
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
        for name, item in (("None", None), ("a number", 2.5), ("a text", "bogus"), ("an object", _Strange())):
            if value and not (item is None and value[0] is None):
                yield f"a list with {name}", [item, *value[1:]]
        yield "nested list", [list(value)]
        if value and isinstance(value[0], torch.Tensor) and type(value[0]) in (torch.Tensor, torch.nn.Parameter):
            for name, item in _tensors(value[0]):
                yield f"first {name}", [item, *value[1:]]
        elif value and isinstance(value[0], list | tuple):
            for name, item in _others(value[0]):
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


def _copied(x: Any) -> Any:
    """Arguments of their own for a call: a call may write to them."""
    if isinstance(x, dict):
        return {name: _copied(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(_copied(value) for value in x)
    return x


def _state(x: Any, seen: set[int]) -> Iterator[Any]:
    """Whatever can be written in ``x``, as values that can be compared."""
    if id(x) in seen:
        return
    if isinstance(x, torch.Tensor) and type(x) in (torch.Tensor, torch.nn.Parameter):
        if x.device.type == "cpu" and x.layout is torch.strided:
            yield x.detach().clone()
    elif isinstance(x, dict):
        for value in x.values():
            yield from _state(value, seen)
    elif isinstance(x, list | tuple):
        yield len(x)
        for value in x:
            yield from _state(value, seen)
    elif hasattr(x, "__dict__") and type(x).__module__.startswith("fusible."):
        seen.add(id(x))
        for name, value in sorted(vars(x).items()):
            yield name
            yield from _state(value, seen)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
    return type(a) is type(b) and a == b


def bad_calls(record: Record, dtype: torch.dtype, places: Sequence[int]) -> Iterator[BadCall]:
    """Every call of ``record``'s samples at these places with one argument replaced. The arguments of each are its own."""
    samples = record.samples(dtype)
    for sample in map(samples.__getitem__, places):
        for name, good in sample.arguments.items():
            for what, _ in _others(good):
                arguments = deepcopy(sample.arguments)
                value = next(value for said, value in _others(arguments[name]) if said == what)
                yield BadCall(record.function, name, what, {**arguments, name: value}, sample, _beside_others(what, good))


def _beside_others(what: str, good: Any) -> bool:
    """Whether the value is legal by itself: Python takes anything for a flag, as true or false."""
    return isinstance(good, bool) or any(what.endswith(size) for size in SIZES)


def words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_][A-Za-z_0-9]*", text))


SENTENCE = re.compile(r"Expected \S.* of \S.*, got .*: \S.*\.")


def clear(error: BaseException, call: BadCall) -> str:
    """Why an error is not clear about what is wrong with ``call``, or nothing.

    It is clear where it is Fusible's own, of one line, and names the function and the argument; or, where the value is wrong only beside others, one
    of the other arguments, with the value.
    """
    text = str(error)
    if not isinstance(error, FusibleError):
        return f"a {type(error).__name__}"
    if "\n" in text:
        return "several lines"
    found = words(text)
    if found.isdisjoint({call.function, call.function.removeprefix("prim_")}):
        return "no function"
    if call.argument in found or (not found.isdisjoint(call.arguments) and (call.relative or _value_shown(call, text))):
        return ""
    return "no argument"


def _value_shown(call: BadCall, text: str) -> bool:
    """Whether a sentence shows the value that was substituted, or what sets it apart."""
    value = call.arguments[call.argument]
    while isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor | list):
        value = value[0]
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.") in text
    return str(value) in text


def outcome(call: BadCall, run: Callable[..., Any] | None = None) -> Outcome:
    """What comes of a bad call."""
    function = run or getattr(tex.prim if call.function.startswith("prim_") else tex, call.function.removeprefix("prim_"))
    before = list(_state(call.arguments, set()))
    try:
        result = function(**call.arguments)
    except Exception as error:  # noqa: BLE001
        wrong = clear(error, call)
        after = list(_state(call.arguments, set()))
        changed = len(before) != len(after) or not all(map(_same, before, after))
        if changed:
            wrong = f"changed, {wrong or 'clear'}"
        return Outcome(wrong or "clear", f"{type(error).__name__}: {error}")
    if call.what == "strided":
        return _right(call, result)
    return Outcome("accepted")


def _right(call: BadCall, result: Any) -> Outcome:
    """Of a call that differs from the good one in how a tensor lies in memory alone, whether the same came of it."""
    try:
        for output in call.sample.outputs:
            check(output, result, call.arguments)
    except Disagreement as error:
        return Outcome("wrong", str(error))
    return Outcome("accepted")
