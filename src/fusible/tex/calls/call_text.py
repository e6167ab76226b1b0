"""The text of a function that takes what a signature says and hands it on: Python itself then binds, checks and defaults a call.

A general ``(*args, **kwargs)`` costs 0.2 to 0.7 us more per call: it packs, loops over what is looked at, and unpacks.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

__all__ = ["CallText", "compiled", "compiled_once", "set_defaults"]


@dataclass(frozen=True)
class CallText:
    """``parameters``: as they stand in a ``def``, each that has a default with None for it (``set_defaults``). ``positional`` and ``named``: how
    they are handed on."""

    parameters: str
    positional: tuple[str, ...]
    named: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, signature: inspect.Signature) -> CallText:
        """The text of a call of ``signature``; what is positional-only may be given by name."""
        accepted: list[str] = []
        positional: list[str] = []
        named: list[str] = []
        for p in signature.parameters.values():
            star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
            if p.kind is p.KEYWORD_ONLY and not any(text.startswith("*") for text in accepted):
                accepted.append("*")
            accepted.append(f"{star}{p.name}{'' if p.default is p.empty else '=None'}")
            if p.kind is p.KEYWORD_ONLY:
                named.append(f"{p.name}={p.name}")
            else:
                (named if p.kind is p.VAR_KEYWORD else positional).append(f"{star}{p.name}")
        return cls(", ".join(accepted), tuple(positional), tuple(named), tuple(signature.parameters))

    @property
    def arguments(self) -> str:
        """What stands between the parentheses of the call."""
        return ", ".join(self.positional + self.named)

    @property
    def by_name(self) -> str:
        """The items of a dictionary of all arguments."""
        return ", ".join(f"{name!r}: {name}" for name in self.names)


def set_defaults(call: Any, signature: inspect.Signature) -> None:
    """Give a function that was made of a ``CallText`` the defaults of ``signature``."""
    parameters = signature.parameters.values()
    call.__defaults__ = tuple(p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty) or None
    call.__kwdefaults__ = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty} or None


def compiled(source: str, file: str, name: str, names: dict[str, Any]) -> Callable[..., Any]:
    """What ``source`` defines as ``name``, with ``names`` for its globals. A traceback shows its lines as those of ``file``."""
    exec(compile(source, file, "exec"), names)
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    return names.pop(name)


_codes: weakref.WeakValueDictionary[tuple[str, str], CodeType] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def compiled_once(source: str, file: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The function that ``source`` is, with ``names`` for its globals. A text that comes again, with other names, is not compiled again (100 to
    300 us) for as long as one of its functions lives. A traceback tells by a number which of the texts of ``file`` it was."""
    code = _codes.get((source, file))
    if code is None:
        numbered = f"{file} {next(_numbers)}"
        code = next(constant for constant in compile(source, numbered, "exec").co_consts if isinstance(constant, CodeType))
        linecache.cache[numbered] = len(source), None, source.splitlines(keepends=True), numbered
        weakref.finalize(code, linecache.cache.pop, numbered, None).atexit = False  # its lines go with it
        _codes[source, file] = code
    return FunctionType(code, names)
