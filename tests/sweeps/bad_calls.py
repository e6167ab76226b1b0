"""Bad calls of tex, made from the good ones of the conformance table: each argument in turn is replaced by each kind of wrong value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from wrong_values import SIZES, changed, others, state, words

from fusible import tex
from fusible.conformance.table import Disagreement, Record, Sample, check
from fusible.errors import FusibleError

__all__ = ["BadCall", "Outcome", "bad_calls", "clear", "outcome", "public"]


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
    """``kind``: "accepted", "clear", or what is wrong with the refusal; ``result``: what came of an accepted call."""

    kind: str
    text: str = ""
    result: Any = None


def bad_calls(record: Record, dtype: torch.dtype, places: Sequence[int]) -> Iterator[BadCall]:
    """Every call of ``record``'s samples at these places with one argument replaced. The arguments of each are its own.

    The good call is made before: what is looked at once, for all calls of its kinds, has been looked at.
    """
    samples = record.samples(dtype)
    for sample in map(samples.__getitem__, places):
        public(record.function)(**deepcopy(sample.arguments))
        for name, good in sample.arguments.items():
            for what, _ in others(good):
                arguments = deepcopy(sample.arguments)
                value = next(value for said, value in others(arguments[name]) if said == what)
                yield BadCall(record.function, name, what, {**arguments, name: value}, sample, _beside_others(what, good))


def _beside_others(what: str, good: Any) -> bool:
    """Whether the value is legal by itself: Python takes anything for a flag, as true or false."""
    return isinstance(good, bool) or any(what.endswith(size) for size in SIZES)


SENTENCE = re.compile(r"\S.*: expected \S.*, got .*; \S.*\.")


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


def public(function: str) -> Callable[..., Any]:
    """The function of that name, as its users call it."""
    return getattr(tex.prim if function.startswith("prim_") else tex, function.removeprefix("prim_"))


def outcome(call: BadCall, run: Callable[..., Any] | None = None) -> Outcome:
    """What comes of a bad call."""
    function = run or public(call.function)
    before = list(state(call.arguments))
    try:
        result = function(**call.arguments)
    except Exception as error:
        wrong = clear(error, call)
        if changed(before, list(state(call.arguments))):
            wrong = f"changed, {wrong or 'clear'}"
        return Outcome(wrong or "clear", f"{type(error).__name__}: {error}")
    if call.what == "strided":
        return _right(call, result)
    return Outcome("accepted", result=result)


def _right(call: BadCall, result: Any) -> Outcome:
    """Of a call that differs from the good one in how a tensor lies in memory alone, whether the same came of it."""
    try:
        for output in call.sample.outputs:
            check(output, result, call.arguments)
    except Disagreement as error:
        return Outcome("wrong", str(error))
    return Outcome("accepted")
