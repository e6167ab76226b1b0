"""The registry: the backends there are, the policy in force, and the choice of a backend for a request.

Choosing happens once per request; whoever caches a choice registers a function that drops it (``on_change``), which is called when a backend is
registered, the policy changes, or the process forks.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fusible import knobs
from fusible.errors import BackendError, NotServedError
from fusible.locks import Lock
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS, Request
from fusible.tex.policy import Policy

__all__ = ["Decision", "Registry", "registry"]

B = TypeVar("B", bound=type[TEXBackendBase])
_log = logging.getLogger("fusible.tex")


@dataclass(frozen=True)
class Decision:
    """Who serves a request (``backend`` is None where nobody does), and for each other backend why it does not."""

    request: Request
    backend: str | None
    others: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"{self.request}: {f'served by {self.backend}' if self.backend else 'not served'}"]
        lines += [f"  {name}: {reason}" for name, reason in self.others]
        return "\n".join(lines)


class Registry:
    """Backends by name, and the policy. Every method is safe under threads."""

    def __init__(self) -> None:
        self._backends: dict[str, TEXBackendBase] = {}
        self._unavailable: dict[str, str | None] = {}
        self._policy: Policy | None = None
        self._plugins_loaded = False
        self._lock = Lock()
        self._listeners: list[Callable[[], None]] = []
        self.epoch = 0

    def register_backend(self, cls: B) -> B:
        """Register a backend class (usable as a decorator). A later class of the same name replaces the earlier one."""
        if not cls.NAME:
            raise BackendError(f"Expected a NAME of the backend {cls.__qualname__}, got none: set the class attribute NAME.")
        with self._lock:
            self._backends[cls.NAME.lower()] = cls()  # pyright: ignore[reportArgumentType]
            self.changed()
        return cls

    def unregister_backend(self, name: str) -> None:
        """Forget a backend; its name is free again."""
        with self._lock:
            self._backends.pop(self.find(name).NAME.lower())
            self.changed()

    def on_change(self, drop: Callable[[], None]) -> None:
        """Call ``drop`` at every change that can alter a choice."""
        self._listeners.append(drop)

    @property
    def policy(self) -> Policy:
        with self._lock:
            if self._policy is None:
                self._policy = Policy.from_environment()
                if self._policy.debug:
                    _show_selections()
            return self._policy

    def set_policy(self, policy: Policy | None) -> Policy:
        """Put ``policy`` in force (None: what the environment says) and return the former one. Unknown or unavailable names are refused."""
        with self._lock:
            self.load_plugins()
            former = self.policy
            wanted = policy if policy is not None else Policy.from_environment()
            self._check(wanted)
            self._policy = wanted
            self.changed()
            return former

    def update_policy(self, **changes: Any) -> Policy:
        """``set_policy`` of the policy in force with ``changes``."""
        with self._lock:
            return self.set_policy(replace(self.policy, **changes))

    def load_plugins(self) -> None:
        """Load backends from outside the package, once: the entry-point group ``te_fl.plugin`` and ``TE_FL_PLUGIN_MODULES``."""
        with self._lock:
            if self._plugins_loaded:
                return
            self._plugins_loaded = True
            for entry in importlib.metadata.entry_points(group="te_fl.plugin"):
                entry.load()(self)
            for module in knobs.TE_FL_PLUGIN_MODULES.get():
                importlib.import_module(module).register(self)

    def ordered(self) -> list[TEXBackendBase]:
        """Every backend, best first: by priority, the reference last."""
        with self._lock:
            self.load_plugins()
            return sorted(self._backends.values(), key=lambda backend: (backend.REFERENCE, -backend.priority, backend.NAME))

    def reason_unavailable(self, backend: TEXBackendBase) -> str | None:
        """Why ``backend`` cannot run here, or None; asked of it once per epoch."""
        with self._lock:
            name = backend.NAME.lower()
            if name not in self._unavailable:
                reason = backend.unavailable()
                if reason is None and not backend.is_available():
                    reason = "its is_available() is false"
                self._unavailable[name] = reason
            return self._unavailable[name]

    def current(self) -> TEXBackendBase:
        """The backend in force: the forced one, else the best available one that serves real tensors."""
        with self._lock:
            self.load_plugins()
            if self.policy.forced:
                self._check(self.policy)
                return self.find(self.policy.forced)
            real = (backend for backend in self.ordered() if backend.DEVICES != frozenset({"lazy"}))
            best = next((backend for backend in real if self.reason_unavailable(backend) is None), None)
            if best is None:
                raise BackendError("Expected an available backend, got none: register one by tex.register_backend.")
            return best

    def choose(self, request: Request) -> TEXBackendBase:
        """The backend that serves ``request``; where none does, an error with every backend's reason."""
        return self._found(self.decide(request))

    def choose_after(self, backend: TEXBackendBase, request: Request) -> TEXBackendBase:
        """The backend that would serve ``request`` if ``backend`` and all that come before it refused."""
        return self._found(self.decide(request, after=backend))

    def _found(self, decision: Decision) -> TEXBackendBase:
        request = decision.request
        if decision.backend is None:
            declaration = DECLARATIONS.get(request.function)
            needs = declaration.unserved if declaration is not None else None
            reasons = "; ".join(f"{name}: {reason}" for name, reason in decision.others if reason != needs)
            what = f": it {needs}" if needs else f" for {request} by any backend"
            raise NotServedError(f"{request.function} not implemented{what}{f' ({reasons})' if reasons else ''}")
        if self.policy.debug:
            _log.info("%s is served by %s", request, decision.backend)
        return self.find(decision.backend)

    def decide(self, request: Request, after: TEXBackendBase | None = None) -> Decision:
        """Choose, and say why not the others; among those that come ``after`` a backend, where one is given."""
        with self._lock:
            self.load_plugins()
            self._check(self.policy)
            chosen: str | None = None
            others: list[tuple[str, str]] = []
            passed = after is None
            for backend, excluded in self._candidates(request.function):
                reason = excluded or self.reason_unavailable(backend) or backend.supports(request)
                if not passed:
                    passed = backend is after
                    reason = reason or "refuses this call"
                if reason is None and chosen is None:
                    chosen = backend.NAME
                else:
                    others.append((backend.NAME, reason or f"comes after {chosen}"))
            return Decision(request, chosen, tuple(others))

    def _candidates(self, function: str) -> Iterator[tuple[TEXBackendBase, str | None]]:
        policy = self.policy
        first = [name.lower() for name in (policy.forced, policy.fallback) if name]
        ordered = sorted(self.ordered(), key=lambda backend: first.index(backend.NAME.lower()) if backend.NAME.lower() in first else len(first))
        only = policy.per_function.get(function) or (policy.forced if policy.strict else None)
        for backend in ordered:
            yield backend, f"the policy gives {function} to {only} alone" if only and backend.NAME.lower() != only.lower() else None

    def _check(self, policy: Policy) -> None:
        for name in (policy.forced, policy.fallback, *policy.per_function.values()):
            if name:
                reason = self.reason_unavailable(self.find(name))
                if reason is not None:
                    raise BackendError(f"Backend '{name}' is not available here: {reason}. Available backends: {self._available()}")

    def find(self, name: str) -> TEXBackendBase:
        """The backend of a name. Raises ``BackendError`` for an unknown one."""
        self.load_plugins()
        backend = self._backends.get(name.lower())
        if backend is None:
            raise BackendError(f"Backend '{name}' not found. Available backends: {self._available()}")
        return backend

    def _available(self) -> list[str]:
        return [backend.NAME for backend in self.ordered() if self.reason_unavailable(backend) is None]

    def changed(self) -> None:
        """Something that a choice depends on has changed: every cached choice is dropped."""
        self.epoch += 1
        self._unavailable.clear()
        for drop in self._listeners:
            drop()

    def _after_fork(self) -> None:
        self.changed()


def _show_selections() -> None:
    """Let the selections be seen by who asked for them and set up no logging of their own."""
    _log.setLevel(logging.INFO)
    if not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())


registry = Registry()
os.register_at_fork(after_in_child=registry._after_fork)
