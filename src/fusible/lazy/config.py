"""``fusible.lazy.config``: settings of the lazy compiler, which hold for the process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.knobs import FUSIBLE_LAZY_CACHE_DIR, FUSIBLE_LAZY_ENGINE, FUSIBLE_LAZY_ERRORS
from fusible.lazy.locate import shows_user

__all__ = ["config"]

_EXTRA = ("flat_ir", "diagnostic")


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise DTypeError(expected("True or False", of=f"config.{name}", got=repr(value), do="assign one of these"))
    return value


def _path(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise DTypeError(expected("a directory's path, or None", of=f"config.{name}", got=repr(value), do="assign a str or a Path"))
    return os.fspath(value)  # type: ignore[return-value]


def _engine(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise DTypeError(expected('"pjrt" or "iree"', of=f"config.{name}", got=repr(value), do="assign an engine's name"))
    return value.lower()


def _extras(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, str | list | tuple | set | frozenset):
        raise DTypeError(expected(f"some of {', '.join(_EXTRA)}", of=f"config.{name}", got=type(value).__qualname__, do="assign a list of these"))
    names = (value,) if isinstance(value, str) else tuple(value)
    for extra in names:
        if extra not in (*_EXTRA, "all"):
            raise ArgumentError(expected(f"some of {', '.join(_EXTRA)}, or all", of=f"config.{name}", got=repr(extra), do="assign a list of these"))
    return _EXTRA if "all" in names else names


class _Setting:
    """An attribute that is checked when it is assigned. Its default is read at the first use, and kept: settings are read on hot paths."""

    def __init__(self, default: Callable[[], Any], check: Callable[[str, Any], Any], doc: str) -> None:
        self._default, self._check, self.__doc__ = default, check, doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, of: Any, owner: type | None = None) -> Any:
        if of is None:
            return self
        values = of._values
        if self._name not in values:
            values[self._name] = self._check(self._name, self._default())
        return values[self._name]

    @shows_user
    def __set__(self, of: Any, value: Any) -> None:
        of._values[self._name] = self._check(self._name, value)

    def __delete__(self, of: Any) -> None:
        of._values.pop(self._name, None)


class Config:
    """The settings. Assigning one holds from then on; ``del config.engine`` goes back to the default, read anew.

    A name that is no setting is refused.
    """

    __slots__ = ("_values",)

    engine = _Setting(
        FUSIBLE_LAZY_ENGINE.get,
        _engine,
        "What compiles and runs programs: ``pjrt`` (XLA on the CPU, from jaxlib) or ``iree`` (the optional extra ``fusible[iree]``). "
        "An engine that is not there is an error; no other takes its place. Default: the variable FUSIBLE_LAZY_ENGINE, or pjrt.",
    )
    timing_cache_file_path = _Setting(
        FUSIBLE_LAZY_CACHE_DIR.get,
        _path,
        "A *directory* in which engine binaries are kept between processes, or ``None`` for none. The engines here time no kernels, so what is "
        "saved is compilation. Binaries hold machine code: use a directory that only you can write to. Default: FUSIBLE_LAZY_CACHE_DIR, or None.",
    )
    enable_input_validation = _Setting(
        lambda: True,
        _switch,
        "Whether functions refuse tensors of dtypes that they do not take. Without it such a call is recorded, and what "
        "comes of it is up to the engine.",
    )
    use_cache_in_eager_mode = _Setting(
        lambda: True,
        _switch,
        "Whether an evaluation uses the program that an equal one was compiled to before. Without it every evaluation compiles.",
    )
    extra_error_information = _Setting(
        FUSIBLE_LAZY_ERRORS.get,
        _extras,
        "What an error of compilation shows besides the user's line: ``flat_ir`` (the program, with the operation marked) and ``diagnostic`` "
        "(all that the compiler said), or ``all``. Default: FUSIBLE_LAZY_ERRORS, or nothing.",
    )

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def __repr__(self) -> str:
        names = (name for name, value in vars(Config).items() if isinstance(value, _Setting))
        return f"Config({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


config = Config()
"""The settings of this process."""
