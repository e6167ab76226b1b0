"""Backends from outside the package: found by entry points and by ``TE_FL_PLUGIN_MODULES``, loaded once, failures remembered."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from fusible import knobs
from fusible.errors import BackendError, expected
from fusible.locks import Lock

__all__ = ["GROUP", "Plugins"]

GROUP = "te_fl.plugin"
"""The group of entry points."""

_REGISTERING = ("register", "te_fl_register")
"""What a plugin's module calls its function."""


class _Registry(Protocol):
    def registered(self) -> dict[str, Any]: ...
    def put_registered(self, backends: dict[str, Any]) -> None: ...


class Plugins:
    """Which plugins were tried, and why some of them did not load.

    Its lock is not the registry's: an import may wait for another thread's, which registers a backend in the module that it imports.
    """

    def __init__(self) -> None:
        self.loaded = False
        self.failed: dict[str, str] = {}
        """By plugin, why it did not load."""
        self._tried: set[str] = set()
        self._lock = Lock()

    def load(self, registry: _Registry) -> None:
        """Let each plugin register its backends. One that fails registers none of them."""
        with self._lock:
            if self.loaded:
                return
            failed: dict[str, str] = {}
            for plugin, find in _found():
                if plugin in self._tried:
                    continue  # tried before an interrupt, or by this very call: a plugin may use tex
                self._tried.add(plugin)
                before = registry.registered()
                try:
                    _registering(find(), plugin)(registry)
                except (Exception, SystemExit) as error:  # whatever a plugin raises, the others load
                    registry.put_registered(before)
                    failed[plugin] = self.failed[plugin] = f"{type(error).__name__}: {error}"
                except BaseException:
                    registry.put_registered(before)
                    self._tried.discard(plugin)
                    raise
            self.loaded = True
        for plugin, reason in failed.items():
            warnings.warn(f"{plugin} did not load, so that other backends serve: {reason}", RuntimeWarning, stacklevel=4)


def _found() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each plugin's name for messages, and what imports it."""
    for entry in importlib.metadata.entry_points(group=GROUP):
        yield f"the plugin {entry.name} = {entry.value}", entry.load
    for module in knobs.TE_FL_PLUGIN_MODULES.get():
        yield f"the plugin {module} of TE_FL_PLUGIN_MODULES", lambda module=module: importlib.import_module(module)


def _registering(found: Any, plugin: str) -> Callable[[Any], Any]:
    """The function of a plugin that registers: itself, or a module's."""
    candidates = [found] if callable(found) else [getattr(found, name, None) for name in _REGISTERING]
    function = next((candidate for candidate in candidates if callable(candidate)), None)
    if function is None:
        raise BackendError(expected("a function register(registry)", of=plugin, got="none", do="define it"))
    return function
