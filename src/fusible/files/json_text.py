"""Strict JSON for loaded files: unambiguous, and with a depth and numbers that every reader supports."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from fusible.errors import CheckpointError, expected

__all__ = ["parse_json"]

_DEPTH = 200
"""The most nested brackets. Sizes of saved executables nest four per level of functions; nothing else nests more than five."""

_INTEGERS = range(-(2**63), 2**64)


class _Refused(ValueError):
    """Says in a few words what is wrong with a text."""


def parse_json(content: bytes | str, *, of: str, do: str = "use an intact checkpoint", unbounded: bool = False) -> Any:
    """The value of a JSON text in UTF-8.

    Raises ``CheckpointError``, which names ``of``, for a text that is no JSON, and for JSON that readers understand differently or not at all: a
    repeated key, NaN and infinities, integers of more than 64 bits, brackets nested more than 200 deep. ``unbounded`` lets such numbers pass, as
    Python's ``json`` writes them: tokenizers' files say 10**30 for "no limit", and the configs of some families have infinities.
    """
    integer, constant = (int, float) if unbounded else (_integer, _constant)
    try:
        text = content if isinstance(content, str) else content.decode()
        value = json.loads(text, object_pairs_hook=_object, parse_int=integer, parse_float=_number, parse_constant=constant)
        _check_depth(value)
    except _Refused as problem:
        raise CheckpointError(expected("JSON", of=of, got=str(problem), do=do)) from None
    except UnicodeDecodeError:
        raise CheckpointError(expected("JSON", of=of, got="bytes that are no UTF-8", do=do)) from None
    except RecursionError:
        raise CheckpointError(expected("JSON", of=of, got=f"more than {_DEPTH} brackets within one another", do=do)) from None
    except ValueError:
        raise CheckpointError(expected("JSON", of=of, got="damaged text", do=do)) from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise _Refused(f"{next(name for name in names if names.count(name) > 1)[:40]!r} twice")
    return made


def _integer(text: str) -> int:
    if len(text) > 20 or (value := int(text)) not in _INTEGERS:
        raise _Refused(f"a number of more than 64 bits ({text[:20]}...)")
    return value


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise _Refused(f"a number that no float holds ({text[:20]})")
    return value


def _constant(text: str) -> NoReturn:
    raise _Refused(text)


def _check_depth(value: Any) -> None:
    """Level by level, so that the check itself goes no deeper than Python's stack."""
    level, depth = [value], 0
    while level:
        if depth >= _DEPTH:
            raise RecursionError
        level = [part for of in level if isinstance(of, (dict, list)) for part in (of.values() if isinstance(of, dict) else of)]
        level = [part for part in level if isinstance(part, (dict, list))]
        depth += 1
