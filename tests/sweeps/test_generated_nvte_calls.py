"""Every function of nvte, called rightly with what was drawn at random, gives what float64 says."""

from __future__ import annotations

import inspect
import zlib
from typing import Any

import pytest
from nvte_functions import DRAWN_CALLS, Draw, DrawnCall, share

from fusible import nvte

FUNCTIONS = {name for name in nvte.__all__ if inspect.isfunction(getattr(nvte, name))}
CALLS = 150
"""Of each function in the long run; 8 in the short one."""


pytestmark = pytest.mark.usefixtures("alone")


def _flat(found: Any) -> list[Any]:
    return [part for item in found for part in _flat(item)] if isinstance(found, list | tuple) else [found]


def _checked(name: str, given: DrawnCall) -> None:
    function = getattr(nvte, name)
    if given.more:
        names = list(inspect.signature(function).parameters)
        place = next(i for i, p in enumerate(inspect.signature(function).parameters.values()) if p.kind is p.VAR_POSITIONAL)
        first = [given.arguments[own] for own in names[:place]]
        found = function(*first, *given.more, **{own: value for own, value in given.arguments.items() if own not in names[:place]})
    else:
        found = function(**given.arguments)
    if callable(given.wanted):
        given.wanted(found)
        return
    parts = _flat(found)
    assert len(parts) == len(given.wanted)
    for place, (part, wanted) in enumerate(zip(parts, given.wanted, strict=True)):
        if wanted is not None:
            error = share(part, wanted, wanted.type)
            assert error <= 1, f"result {place} is {error:.3g} times its bound apart"


def _run(name: str, count: int) -> None:
    for seed in range(count):
        given = DRAWN_CALLS[name](Draw(zlib.crc32(name.encode()) + seed))
        try:
            _checked(name, given)
        except Exception as error:
            shapes = {key: (str(getattr(v, "type", "")), list(v.shape)) if hasattr(v, "shape") else v for key, v in given.arguments.items()}
            raise AssertionError(f"{name}, draw {seed}: {type(error).__name__}: {error}; {shapes} {given.more}") from error


def test_every_word_is_drawn() -> None:
    assert set(DRAWN_CALLS) == FUNCTIONS


@pytest.mark.parametrize("name", sorted(DRAWN_CALLS))
def test_what_functions_give(name: str) -> None:
    _run(name, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DRAWN_CALLS))
def test_what_functions_give_at_length(name: str) -> None:
    _run(name, CALLS)
