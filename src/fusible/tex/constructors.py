"""What a class's constructor may be given, by its annotations: held against every call, for what it is given is often read much later."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusible.errors import expected
from fusible.tex.argument_kinds import Kind, kind_of

__all__ = ["check_constructor"]

_MEANT = {
    **dict.fromkeys(("in_features", "out_features", "features", "heads", "head_width", "size", "num_groups", "sequences", "capacity"), "Count"),
    "device": "DeviceName | None",
    "fp8_dtype": "FP8Format",
    "groups": "Count | None",
    "page_size": "Count | None",
    "pages": "Count | None",
}
"""Parameters whose annotation, for type checkers, says less than is asked."""

_HERE = __name__.partition(".")[0] + "."


def check_constructor(cls: type, known: Mapping[str, Any] | None = None) -> None:
    """Let the constructor that ``cls`` defines refuse, before it begins, an argument that is not of the kind that its annotation says.

    Raises ``DTypeError``, ``ArgumentError`` for a value of the right class. Annotations that say nothing known here allow anything; ``known`` are
    names that a room adds. Classes from outside the package are left alone: their annotations are their own affair.
    """
    made = cls.__dict__.get("__init__")
    if made is None or not cls.__module__.startswith(_HERE):
        return
    signature = inspect.signature(made)
    kinds: dict[str, Kind] = {}
    for name, parameter in signature.parameters.items():
        kind = kind_of(_MEANT.get(name, parameter.annotation), known or {})
        if kind is not None and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            kinds[name] = kind
    if kinds:
        positional = [name for name, p in signature.parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        cls.__init__ = _checked(made, positional, kinds)  # type: ignore[misc]


def _checked(made: Callable[..., None], positional: Sequence[str], kinds: Mapping[str, Kind]) -> Callable[..., None]:
    """``made``, checked before. Arguments that it has no place for are left to Python, which says so itself."""
    places = [(name, kinds.get(name)) for name in positional]

    @functools.wraps(made)
    def checked(*args: Any, **kwargs: Any) -> None:
        for value, (name, kind) in zip(args, places, strict=False):
            if kind is not None and (found := kind.wrong(value, name)) is not None:
                raise _refusal(found, args[0])
        for name, value in kwargs.items():
            if name in kinds and (found := kinds[name].wrong(value, name)) is not None:
                raise _refusal(found, args[0])
        made(*args, **kwargs)

    return checked


def _refusal(found: tuple[str, Kind, str], made: object) -> Exception:
    place, kind, got = found
    return kind.error(expected(kind.what, of=f"{place} of {type(made).__name__}", got=got, do="pass one"))
