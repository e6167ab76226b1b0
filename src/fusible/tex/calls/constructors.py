"""What a class's constructor, or a module's forward, may be given, by its annotations: held against every call, for it is often read much later."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusible.errors import expected
from fusible.tex.calls.argument_kinds import Kind, kind_of

__all__ = ["check_constructor", "check_forward"]

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
    if made is not None and cls.__module__.startswith(_HERE):
        cls.__init__ = _by_annotations(made, known or {})  # type: ignore[misc]


def check_forward(cls: Any) -> None:
    """``check_constructor`` of the ``forward`` of a module. What ``torch.compile`` traces is not looked at."""
    made, looked_at = cls.__dict__["forward"], _by_annotations(cls.__dict__["forward"], {})

    @functools.wraps(made)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return made(*args, **kwargs) if torch.compiler.is_compiling() else looked_at(*args, **kwargs)

    cls.forward = forward


def _by_annotations(made: Callable[..., Any], known: Mapping[str, Any]) -> Callable[..., Any]:
    """A method that looks at its arguments before it begins, if its annotations say anything of them."""
    signature = inspect.signature(made)
    kinds: dict[str, Kind] = {}
    for name, parameter in signature.parameters.items():
        kind = kind_of(_MEANT.get(name, parameter.annotation), known)
        if kind is not None and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            kinds[name] = kind
    positional = [name for name, p in signature.parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return _checked(made, positional, kinds) if kinds else made


def _checked(made: Callable[..., Any], positional: Sequence[str], kinds: Mapping[str, Kind]) -> Callable[..., Any]:
    """``made``, checked before. Arguments that it has no place for are left to Python, which says so itself."""
    places = [(name, kinds.get(name)) for name in positional]

    @functools.wraps(made)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value, (name, kind) in zip(args, places, strict=False):
            if kind is not None and (found := kind.wrong(value, name)) is not None:
                raise _refusal(found, args[0])
        for name, value in kwargs.items():
            if name in kinds and (found := kinds[name].wrong(value, name)) is not None:
                raise _refusal(found, args[0])
        return made(*args, **kwargs)

    return checked


def _refusal(found: tuple[str, Kind, str], made: object) -> Exception:
    place, kind, got = found
    return kind.error(expected(kind.what, of=f"{place} of {type(made).__name__}", got=got, do="pass one"))
