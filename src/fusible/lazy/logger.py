"""``fusible.lazy.logger``: messages of the lazy compiler on the standard error stream, by level, channel and module."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.knobs import FUSIBLE_LAZY_VERBOSITY
from fusible.lazy.locate import shows_user
from fusible.locks import Lock

__all__ = ["CHANNELS", "LEVELS", "Logger", "logger"]

LEVELS = ("verbose", "info", "warning", "error")
"""Each level shows those after it as well."""

CHANNELS = ("trace", "flat_ir", "mlir", "timing")
"""Channels, which are shown only where they are named."""

_IR = frozenset({"trace", "flat_ir", "mlir"})
_OURS = "fusible.lazy."

Message = str | Callable[[], str]
"""A text, or a function that makes it, called only where it is shown."""

Verbosity = str | Collection[str] | Mapping[str, str | Collection[str]]

_Rules = list[tuple[str, frozenset[str]]]


class Logger:
    """Messages of four levels and four channels.

    ``logger.verbosity = "info"`` shows that level and what is more severe; ``{"info", "trace", "timing"}`` channels too; ``"ir"`` is trace,
    flat_ir and mlir. A mapping sets it by module, ``{"flat_ir": "verbose", "engine": {"timing", "error"}, "": "warning"}``: the longest name that a
    module of ``fusible.lazy`` begins with counts, ``""`` for all others. Raises ``ArgumentError`` for a name that is neither level nor channel.

    ``info(message, mode="once")`` shows a text once in the life of the process. A message may be a function that returns its text.
    """

    def __init__(self) -> None:
        self._verbosity: Any = None
        self._rules: _Rules | None = None
        self._shown: set[tuple[str, str]] = set()
        self._lock = Lock()

    @property
    def verbosity(self) -> Any:
        """The verbosity that was assigned; before that, the variable FUSIBLE_LAZY_VERBOSITY, or ``("warning",)``."""
        if self._rules is None:
            self.verbosity = FUSIBLE_LAZY_VERBOSITY.get()
        return self._verbosity

    @verbosity.setter
    @shows_user
    def verbosity(self, verbosity: Verbosity) -> None:
        by_module = verbosity if isinstance(verbosity, Mapping) else {"": verbosity}
        rules = [(name.replace("/", ".").removeprefix(_OURS), _enabled(names)) for name, names in by_module.items()]
        self._rules = sorted(rules, key=lambda rule: -len(rule[0]))
        self._verbosity = verbosity

    @contextmanager
    def use_verbosity(self, verbosity: Verbosity) -> Iterator[Logger]:
        """Another verbosity while the context is open."""
        before = self.verbosity
        self.verbosity = verbosity
        try:
            yield self
        finally:
            self.verbosity = before

    def shows(self, channel: str, module: str = "") -> bool:
        """Whether messages of a level or channel from a module of ``fusible.lazy`` are shown."""
        return channel in self._of(module.removeprefix(_OURS))

    def _of(self, module: str) -> frozenset[str]:
        if self._rules is None:
            self.verbosity = FUSIBLE_LAZY_VERBOSITY.get()
        for name, enabled in self._rules or ():
            if not name or module == name or module.startswith(name + "."):
                return enabled
        return frozenset()

    @property
    def times(self) -> bool:
        """Whether timing is shown of any module: asked before every execution."""
        rules = self._rules
        if rules is None:
            self.verbosity = FUSIBLE_LAZY_VERBOSITY.get()
            rules = self._rules or []
        for _, enabled in rules:
            if "timing" in enabled:
                return True
        return False

    def verbose(self, message: Message, mode: str = "always") -> None:
        self._say("verbose", message, mode)

    def info(self, message: Message, mode: str = "always") -> None:
        self._say("info", message, mode)

    def warning(self, message: Message, mode: str = "always") -> None:
        self._say("warning", message, mode)

    def error(self, message: Message, mode: str = "always") -> None:
        self._say("error", message, mode)

    def trace(self, message: Message, mode: str = "always") -> None:
        self._say("trace", message, mode)

    def flat_ir(self, message: Message, mode: str = "always") -> None:
        self._say("flat_ir", message, mode)

    def mlir(self, message: Message, mode: str = "always") -> None:
        self._say("mlir", message, mode)

    def timing(self, message: Message, mode: str = "always") -> None:
        self._say("timing", message, mode)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Say on the channel ``timing`` how long the context was open: ``what took 1.234 ms``. The module is the caller's."""
        module = sys._getframe(2).f_globals.get("__name__", "")
        start = time.perf_counter()
        yield
        took = time.perf_counter() - start
        self._write("timing", module, lambda: f"{what} took {1e3 * took:.3f} ms", "always")

    def _say(self, channel: str, message: Message, mode: str) -> None:
        if mode not in ("always", "once"):
            raise ArgumentError(expected('"always" or "once"', of="the mode of a message", got=repr(mode), do="pass one of these"))
        self._write(channel, sys._getframe(2).f_globals.get("__name__", ""), message, mode)

    def _write(self, channel: str, module: str, message: Message, mode: str) -> None:
        if not self.shows(channel, module):
            return
        text = message() if callable(message) else message
        with self._lock:
            if mode == "once" and (channel, text) in self._shown:
                return
            self._shown.add((channel, text)) if mode == "once" else None
            sys.stderr.write(f"{text}\n" if channel in _IR else f"[{channel}] {text}\n")


def _enabled(names: str | Collection[str]) -> frozenset[str]:
    """The levels and channels that names stand for."""
    found: set[str] = set()
    for wanted_name in names if isinstance(names, Collection) and not isinstance(names, str) else (names,):
        name = wanted_name.lower() if isinstance(wanted_name, str) else wanted_name
        if name == "ir":
            found |= _IR
        elif name in CHANNELS:
            found.add(name)
        elif name in LEVELS:
            found.update(LEVELS[LEVELS.index(name) :])
        else:
            wanted = f"some of {', '.join([*LEVELS, *CHANNELS, 'ir'])}"
            raise ArgumentError(expected(wanted, of="logger.verbosity", got=repr(wanted_name), do="name levels and channels"))
    return frozenset(found)


logger = Logger()
"""The logger of this process."""
