"""User-defined functions that programs call: XLA FFI handlers, by name."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fusible.errors import ArgumentError, DTypeError, MissingModuleError, check_callable, check_text, expected
from fusible.lazy.engine import pjrt
from fusible.lazy.locate import pointing, shows_user
from fusible.locks import Lock

__all__ = ["Plugin", "find_target", "full_name", "is_registered", "plugin_named", "register_plugin"]


@dataclass(frozen=True)
class Plugin:
    """A registered handler. ``target`` is what XLA calls it; ``outputs`` tells the shapes and dtypes of its results, where it was given."""

    target: str
    handler: Any
    outputs: Callable[..., Any] | None


_FUNCTION = ctypes.CFUNCTYPE(None).__mro__[1]
"""The class of every function of a ctypes library; ctypes has no public name for it."""

_PLUGINS: dict[tuple[str, str], Plugin] = {}
_LOCK = Lock()


def full_name(name: str, namespace: str) -> str:
    """``namespace::name``, or ``name`` alone without a namespace."""
    return f"{namespace}::{name}" if namespace else name


_OF_FUSIBLE = {"fusible::native@1": "fusible.tex.backends.xla.native"}
"""What programs of Fusible's own call, by the target's name: the module whose ``register()`` makes it known."""


def find_target(target: str) -> None:
    """Make a target known that a program calls and that nobody has registered, as in a new process that loads the program. Raises
    ``MissingModuleError`` where it is not to be found here."""
    name, _, version = target.rpartition("@")
    if target in _OF_FUSIBLE:
        importlib.import_module(_OF_FUSIBLE[target]).register()
    elif not is_registered(name, version):
        of, do = f"a program that calls the plugin {name!r} version {version!r}", "call register_plugin with its handler first"
        raise MissingModuleError(expected("that plugin", of=of, got="none of that name and version", do=do))


pjrt.when_missing(find_target)


def is_registered(name: str, version: str) -> bool:
    """Whether there is a plugin of that full name and version."""
    return (name, version) in _PLUGINS


def plugin_named(name: str, version: str) -> Plugin:
    """The plugin of a full name; raises ``ArgumentError`` where none is registered."""
    found = _PLUGINS.get((name, version))
    if found is None:
        known = ", ".join(f"{n!r} version {v!r}" for n, v in _PLUGINS) or "none"
        got = f"{name!r} version {version!r} (registered: {known})"
        error = ArgumentError(expected("a registered plugin", of="a call of plugin", got=got, do="call register_plugin with its handler first"))
        raise pointing(error, "name")
    return found


@shows_user
def register_plugin(
    name: str,
    handler: Any,
    *,
    version: str = "1",
    namespace: str = "",
    symbol: str | None = None,
    outputs: Callable[..., Any] | None = None,
) -> None:
    """Let ``plugin(name, ...)`` call ``handler``, an XLA FFI handler of the typed interface (``xla/ffi/api/ffi.h``), on the host.

    ``handler`` is a ``PyCapsule`` of it, its function in a ``ctypes`` library, or the path of a shared library, where it is called ``symbol``
    (by default the last part of ``name``). ``name`` may be ``"namespace::name"``. It gets its operands as row-major buffers in the order of
    ``inputs``, writes its results likewise, and must have no other effect: equal calls may be computed once.

    ``outputs(*inputs, **attributes)`` tells the results: a list of pairs of a shape and a dtype, from tensors of which only ``shape`` and
    ``dtype`` are known. Without it, every call says them.

    A name with a version is registered once per process. Raises ``ArgumentError`` for a second handler of a registered name or a symbol that the
    library lacks, and ``DTypeError`` for a handler, a name or ``outputs`` of another type.
    """
    for what, text in (("name", name), ("version", version), ("namespace", namespace)):
        check_text(text, f"{what} of register_plugin")
    check_text(symbol, "symbol of register_plugin", optional=True)
    check_callable(outputs, "outputs of register_plugin", optional=True)
    key = (full_name(name, namespace), version)
    capsule = _capsule(handler, symbol or key[0].rpartition("::")[2])
    with _LOCK:
        if key in _PLUGINS:
            raise ArgumentError(expected("a new name", of="a plugin to register", got=f"{key[0]!r} version {version!r}", do="pass another version"))
        target = f"{key[0]}@{version}"
        pjrt.register_target(target, capsule)
        _PLUGINS[key] = Plugin(target, (handler, capsule), outputs)


def _capsule(handler: Any, symbol: str) -> Any:
    """The capsule of a handler, however it was given."""
    if isinstance(handler, str | os.PathLike):
        try:
            handler = getattr(ctypes.CDLL(os.fspath(handler)), symbol)
        except (OSError, AttributeError) as error:
            wanted = f"a shared library with the symbol {symbol!r}"
            raise ArgumentError(expected(wanted, of="the handler of a plugin", got=str(error), do="build it with that name")) from error
    if type(handler).__name__ == "PyCapsule":
        return handler
    if not isinstance(handler, _FUNCTION):
        wanted = "a PyCapsule, a ctypes function or the path of a shared library"
        raise DTypeError(expected(wanted, of="the handler of a plugin", got=type(handler).__name__, do="build it as an XLA FFI handler in C++"))
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", ctypes.pythonapi))
    return make(ctypes.cast(handler, ctypes.c_void_p), None, None)
