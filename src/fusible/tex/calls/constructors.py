"""Checks of the arguments of constructors and of modules' ``forward``, by their annotations. Every call is checked, since an argument is often read
much later."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusible.tex.calls.argument_kinds import Kind, kind_of

__all__ = ["check_constructor", "check_forward", "constructor_kinds", "kinds_of", "looked_at"]

_MEANT = {
    **dict.fromkeys(("in_features", "out_features", "inner_features", "features", "heads", "head_width", "key_width"), "Count"),
    **dict.fromkeys(("experts", "top_k", "size", "num_groups", "sequences", "capacity"), "Count"),
    "device": "DeviceName | None",
    "fp8_dtype": "FP8Format",
    "groups": "Count | None",
    "page_size": "Count | None",
    "pages": "Count | None",
    "rope_base": "Positive | None",
    "rope_width": "Count | None",
    "value_width": "Count | None",
    "top_groups": "Count | None",
}
"""Parameters whose annotation, for type checkers, says less than is asked."""

_HERE = __name__.partition(".")[0] + "."


def check_constructor(cls: type, known: Mapping[str, Any] | None = None) -> None:
    """Let the constructor that ``cls`` defines refuse, before it begins, an argument that is not of the kind that its annotation says.

    Raises ``DTypeError``, ``ArgumentError`` for a value of the right class. Annotations that say nothing known here allow anything; ``known`` are
    names that a room adds. Classes from outside the package are left alone: their annotations are their own affair.
    """
    made = cls.__dict__.get("__init__")
    if made is not None and cls.__module__.startswith(_HERE):
        cls.__init__ = _by_annotations(made, known or {})  # type: ignore[misc]


def check_forward(cls: Any) -> None:
    """``check_constructor`` of the ``forward`` of a module. What ``torch.compile`` traces is not looked at."""
    made, checked = cls.__dict__["forward"], _by_annotations(cls.__dict__["forward"], {})

    @functools.wraps(made)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return made(*args, **kwargs) if torch.compiler.is_compiling() else checked(*args, **kwargs)

    cls.forward = forward


def _by_annotations(made: Callable[..., Any], known: Mapping[str, Any]) -> Callable[..., Any]:
    """A method that looks at its arguments before it begins, if its annotations say anything of them."""
    kinds = constructor_kinds(made, known)
    return looked_at(made, kinds, lambda owner, *_: type(owner).__name__) if kinds else made


def constructor_kinds(made: Callable[..., Any], known: Mapping[str, Any] | None = None) -> dict[str, Kind]:
    """``kinds_of`` a constructor's parameters."""
    return kinds_of(made, known or {}, _MEANT)


def kinds_of(function: Callable[..., Any], known: Mapping[str, Any], meant: Mapping[str, str] | None = None) -> dict[str, Kind]:
    """The kinds of the parameters of a function whose annotations, or what is ``meant`` by these, say something known (``kind_of``)."""
    single = [p for p in inspect.signature(function).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    found = {p.name: kind_of((meant or {}).get(p.name, p.annotation), known) for p in single}
    return {name: kind for name, kind in found.items() if kind is not None}


def looked_at(function: Callable[..., Any], kinds: Mapping[str, Kind], owner: Callable[..., str]) -> Callable[..., Any]:
    """``function``, which refuses before it begins an argument that is not of its kind; ``owner(*args)`` is what the sentence calls it.

    Arguments that it has no place for are left to Python, which says so itself.
    """
    rows = {name: (name, kind, kind.at_once) for name, kind in kinds.items()}
    parameters = inspect.signature(function).parameters.values()
    places = [rows.get(p.name) for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value, row in zip(args, places, strict=False):
            if row is not None and value.__class__ not in row[2] and (found := row[1].wrong(value, row[0])) is not None:
                raise found.error(owner(*args))
        for key, value in kwargs.items():
            row = rows.get(key)
            if row is not None and value.__class__ not in row[2] and (found := row[1].wrong(value, key)) is not None:
                raise found.error(owner(*args))
        return function(*args, **kwargs)

    return checked
