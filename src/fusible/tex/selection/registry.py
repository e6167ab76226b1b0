"""The registry: the backends there are, the policy in force, and the choice of a backend for a request.

Choosing happens once per request; whoever caches a choice registers a function that drops it (``on_change``), which is called when a backend is
registered, the policy changes, or the process forks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, overload

from fusible.errors import ArgumentError, BackendError, NotServedError, check_switch, expected
from fusible.locks import Lock
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS, Request
from fusible.tex.selection.backend_checks import admitted, nearest
from fusible.tex.selection.decision import Decision, refusal
from fusible.tex.selection.implementations import by_backend
from fusible.tex.selection.plugins import Plugins
from fusible.tex.selection.policy import Policy, matches, vendor_names
from fusible.tex.selection.scope import Scope, current_scope

__all__ = ["Decision", "Registry", "registry"]

B = TypeVar("B", bound=type[TEXBackendBase])
_log = logging.getLogger("fusible.tex")
_SCOPES = 64
"""Policies entered by ``with`` whose choices are kept."""


class Registry:
    """Backends by name, and the policy. Every method is safe under threads.

    The policy is the process's, or the one that was entered by ``with`` in the calling thread or task (``fusible.tex.selection.scope``).
    """

    def __init__(self) -> None:
        self._backends: dict[str, TEXBackendBase] = {}
        self._unavailable: dict[str, str | None] = {}
        self._policy: Policy | None = None
        self._plugins = Plugins()
        self._scopes: dict[Policy, Scope] = {}
        self._lock = Lock()
        self._listeners: list[Callable[[], None]] = []
        self.epoch = 0

    @overload
    def register_backend(self, cls: B, *, replace: bool = False) -> B: ...
    @overload
    def register_backend(self, cls: None = None, *, replace: bool = False) -> Callable[[B], B]: ...

    def register_backend(self, cls: Any = None, *, replace: bool = False) -> Any:
        """Register a backend class; usable as a decorator, with and without ``replace``.

        The very same class may be registered again; another one of a name that is taken takes its place with ``replace`` alone, and never that of
        the reference. Raises ``BackendError`` for those, for a class without a name, with a public method that tex does not have (a misspelt
        function would never be served), or with a method that does not take what its function is declared with.
        """
        check_switch(replace, "replace of register_backend")
        if cls is None:
            return lambda cls: self.register_backend(cls, replace=replace)
        backend = admitted(cls)
        with self._lock:
            self._add(backend, replace)
        return cls

    def register_impl(self, implementation: Any) -> None:
        """``register_many`` of one."""
        self.register_many([implementation])

    def register_many(self, implementations: Sequence[Any]) -> None:
        """Register functions one by one, as plugins of TransformerEngine-FL do: ``tex.OpImpl`` objects, or others with its fields.

        Those of one ``impl_id`` make one backend. All are registered or none; raises ``BackendError`` for what ``register_backend`` refuses, and
        for a function that tex does not have.
        """
        backends = [admitted(cls) for cls in by_backend(implementations)]
        with self._lock:
            before = dict(self._backends)
            try:
                for backend in backends:
                    self._add(backend, replace=False)
            except BackendError:
                self._backends = before
                self.changed()
                raise

    def _add(self, backend: TEXBackendBase, replace: bool) -> None:
        name, cls = backend.NAME.lower(), type(backend)
        former = self._backends.get(name)
        if former is not None and type(former) is cls:
            return
        if former is not None and (former.REFERENCE or not replace):
            do = "choose another NAME" if former.REFERENCE else "choose another NAME, or pass replace=True"
            got = f"{cls.__module__}.{cls.__qualname__} beside {type(former).__module__}.{type(former).__qualname__}"
            raise BackendError(expected("one backend", of=f"the name '{name}'", got=got, do=do))
        reference = next((other.NAME for other in self._backends.values() if other.REFERENCE), None)
        if backend.REFERENCE and reference is not None:
            do = "leave REFERENCE out"
            raise BackendError(expected("one reference", of="tex", got=f"{cls.__qualname__} beside {reference}", do=do))
        self._backends[name] = backend
        self.changed()

    def unregister_backend(self, name: str) -> None:
        """Forget a backend; its name is free again. Raises ``BackendError`` for an unknown one, and for the reference."""
        found = self.find(name)
        if found.REFERENCE:
            raise BackendError(expected("a backend that tex can do without", of="unregister_backend", got=f"the reference '{name}'", do="leave it"))
        with self._lock:
            self._backends.pop(found.NAME.lower(), None)
            self.changed()

    def on_change(self, drop: Callable[[], None]) -> None:
        """Call ``drop`` at every change that can alter a choice."""
        self._listeners.append(drop)

    @property
    def policy(self) -> Policy:
        """The policy in force here: of the innermost ``with`` of this thread or task, else the process's."""
        scope = current_scope()
        return scope.policy if scope is not None else self.policy_of_process()

    def policy_of_process(self) -> Policy:
        """The policy of whoever has not entered another one."""
        with self._lock:
            if self._policy is None:
                self._policy = Policy.from_environment()
                if self._policy.debug:
                    _show_selections()
            return self._policy

    def put_policy(self, make: Callable[[Policy], Policy]) -> tuple[Policy, Policy]:
        """Put in force, for the process, what ``make`` makes of its policy; the former one and the new one."""
        with self._lock:
            former = self.policy_of_process()
            self._policy = made = make(former)
            if made.debug and not former.debug:
                _show_selections()
            self.changed()
            return former, made

    def take_back(self, made: Policy, former: Policy) -> None:
        """Put ``former`` in force for the process, if ``made`` still is."""
        with self._lock:
            if self._policy is made:
                self._policy = former
                self.changed()

    def scope_of(self, policy: Policy) -> Scope:
        """The key of the choices made under ``policy``."""
        with self._lock:
            scope = self._scopes.get(policy)
            if scope is None:
                if len(self._scopes) >= _SCOPES:
                    self._scopes.clear()
                    self.changed()
                scope = self._scopes[policy] = Scope(policy)
            return scope

    def load_plugins(self) -> None:
        """Load backends from outside the package, once: the entry-point group ``te_fl.plugin`` and ``TE_FL_PLUGIN_MODULES``.

        A plugin that fails is remembered with its reason (``failed_plugins``), and warned of once; the others are loaded.
        """
        if not self._plugins.loaded:
            self._plugins.load(self)

    def failed_plugins(self) -> dict[str, str]:
        """The plugins that did not load, each with its reason."""
        self.load_plugins()
        return dict(self._plugins.failed)

    def registered(self) -> dict[str, TEXBackendBase]:
        """The backends by name in lower case, as they are registered now."""
        with self._lock:
            return dict(self._backends)

    def put_registered(self, backends: dict[str, TEXBackendBase]) -> None:
        """Put back what ``registered`` gave."""
        with self._lock:
            self._backends = dict(backends)
            self.changed()

    def ordered(self) -> list[TEXBackendBase]:
        """Every backend, best first: by priority, the reference last."""
        self.load_plugins()
        with self._lock:
            return sorted(self._backends.values(), key=lambda backend: (backend.REFERENCE, -backend.priority, backend.NAME))

    def reason_unavailable(self, backend: TEXBackendBase) -> str | None:
        """Why ``backend`` cannot run here, or None; asked of it once per epoch. What its answer raises is such a reason."""
        with self._lock:
            name = backend.NAME.lower()
            if name not in self._unavailable:
                try:
                    reason = backend.unavailable()
                    if reason is None and not backend.is_available():
                        reason = "its is_available() is false"
                except Exception as error:  # a vendor's probe may fail in any way, and none of them is a backend that can run
                    reason = f"its probe raised {type(error).__name__}: {error}"
                told = reason is None or (isinstance(reason, str) and reason.strip())
                self._unavailable[name] = reason if told else f"its unavailable() is {reason!r}"
            return self._unavailable[name]

    def current(self) -> TEXBackendBase:
        """The backend in force: the forced one, else the best available one that serves real tensors."""
        self.load_plugins()
        policy = self.policy
        with self._lock:
            self.check(policy)
            if policy.forced:
                return self.find(policy.forced)
            best = self._best([backend for backend, _ in self._candidates(policy, None)], policy)
            if best is None:
                raise BackendError(expected("an available backend", of="tex", got="none", do="register one by tex.register_backend"))
            return self.find(best)

    def serving(self) -> list[TEXBackendBase]:
        """The backends that may serve and can run here, best first under the policy in force."""
        policy = self.policy
        return [b for b, excluded in self._candidates(policy, None) if excluded is None and self.reason_unavailable(b) is None]

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
            reasons = [f"{name}: {reason}" for name, reason in decision.others if reason != needs]
            reasons += [f"{plugin} did not load: {reason}" for plugin, reason in decision.failed]
            what = f": it {needs}" if needs else f" for {request} by any backend"
            listed = f" ({'; '.join(reasons)})" if reasons else ""
            raise NotServedError(f"{request.function} not implemented{what}{listed}")
        if self.policy.debug:
            _log.info("%s is served by %s", request, decision.backend)
        return self.find(decision.backend)

    def decide(self, request: Request, after: TEXBackendBase | None = None) -> Decision:
        """Choose, and say why not the others; among those that come ``after`` a backend, where one is given that is still registered."""
        failed = tuple(self.failed_plugins().items())
        policy = self.policy
        with self._lock:
            self.check(policy)
            chosen: str | None = None
            others: list[tuple[str, str]] = []
            candidates = list(self._candidates(policy, request.function))
            passed = all(backend is not after for backend, _ in candidates)
            for backend, excluded in candidates:
                reason = excluded or self.reason_unavailable(backend) or refusal(backend, request)
                if not passed:
                    passed = backend is after
                    reason = reason or "refuses this call"
                if reason is None and chosen is None:
                    chosen = backend.NAME
                else:
                    others.append((backend.NAME, reason or f"comes after {chosen}"))
            return Decision(request, chosen, tuple(others), failed)

    def _candidates(self, policy: Policy, function: str | None) -> Iterator[tuple[TEXBackendBase, str | None]]:
        """Every backend in the order of ``policy``, with why the policy leaves it out of ``function``, or None."""
        wanted = policy.wanted(function) if function is not None else ()
        if not wanted and policy.strict and policy.forced:
            wanted = (policy.forced,)
        meant = [self._meant(token) for token in wanted]
        liked = sorted(self.ordered(), key=lambda backend: policy.prefer is not None and backend.KIND != policy.prefer)
        first = (policy.forced or self._best(liked, policy), policy.fallback) if policy.forced or policy.fallback else ()
        names = [name.lower() for name in first if name]

        def place(backend: TEXBackendBase) -> tuple[int, int]:
            own = next((i for i, several in enumerate(meant) if backend in several), len(meant))
            name = backend.NAME.lower()
            return own, names.index(name) if name in names else len(names)

        for backend in sorted(liked, key=place):
            if wanted and not any(backend in several for several in meant):
                yield backend, f"the policy gives {function} to {', then '.join(wanted)} alone"
            else:
                yield backend, _left_out(backend, policy)

    def _best(self, backends: list[TEXBackendBase], policy: Policy) -> str | None:
        """The first that serves real tensors and may."""
        for backend in backends:
            if backend.DEVICES != frozenset({"lazy"}) and _left_out(backend, policy) is None and self.reason_unavailable(backend) is None:
                return backend.NAME
        return None

    def _meant(self, token: str) -> list[TEXBackendBase]:
        """The backends that a word of ``per_function`` means: the one of that name, else those of a kind, a vendor or an ``impl_id``."""
        named = self._backends.get(token.lower())
        return [named] if named is not None else [backend for backend in self.ordered() if matches(backend, token)]

    def check(self, policy: Policy) -> None:
        """Raise ``BackendError`` for a policy that cannot be followed here: it names what is not there, cannot run, or is denied by it as well."""
        for field, name in (("forced", policy.forced), ("fallback", policy.fallback)):
            if name:
                backend = self.find(name, asked=policy.asked_by(field))
                reason = self.reason_unavailable(backend) or _left_out(backend, policy)
                if reason is not None:
                    raise BackendError(
                        f"Backend '{name}' is not available here: {reason}. Available backends: {self._available()}{policy.asked_by(field)}"
                    )
        for function in policy.per_function:
            self._check_function(function, policy)
        known = {name for backend in self.ordered() if not backend.REFERENCE for name in vendor_names(backend)}
        for field, names in (("allow_vendors", policy.allow_vendors or ()), ("deny_vendors", policy.deny_vendors)):
            for name in sorted(set(names) - known):
                what, do = f"vendors or backends of {', '.join(sorted(known))}", f"name those{self._failures()}"
                raise BackendError(expected(what, of=_of(policy, field), got=repr(name), do=do))

    def _check_function(self, function: str, policy: Policy) -> None:
        of = _of(policy, "per_function")
        if function not in DECLARATIONS:
            raise ArgumentError(expected("functions of tex", of=of, got=f"{function}{nearest(function)}", do="look the names up in dir(tex)"))
        reasons: dict[str, str] = {}
        for token in policy.wanted(function):
            meant = self._meant(token)
            if not meant and token.lower() != "vendor":
                if ":" not in token:
                    self.find(token, asked=policy.asked_by("per_function"))
                known = "a backend's name, flagos, vendor, vendor:NAME, reference or impl:ID"
                got = f"{token!r}, which no backend is"
                raise BackendError(expected(known, of=f"{function} in {of}", got=got, do=f"name a backend that is registered{self._failures()}"))
            for backend in meant:
                reason = self.reason_unavailable(backend) or _left_out(backend, policy)
                if reason is None:
                    return
                reasons[backend.NAME] = reason
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "no backend is meant"
        raise BackendError(
            f"Backend '{'|'.join(policy.wanted(function))}' is not available here for {function}: {listed}. "
            f"Available backends: {self._available()}{policy.asked_by('per_function')}"
        )

    def find(self, name: str, asked: str = "") -> TEXBackendBase:
        """The backend of a name. Raises ``BackendError`` for an unknown one, with what ``asked`` for it."""
        if not isinstance(name, str):
            raise BackendError(expected("a backend's name", of="what names a backend", got=type(name).__qualname__, do="pass a text"))
        self.load_plugins()
        backend = self._backends.get(name.lower())
        if backend is None:
            raise BackendError(f"Backend '{name}' not found. Available backends: {self._available()}{asked}{self._failures()}")
        return backend

    def _failures(self) -> str:
        return "".join(f"; {plugin} did not load: {reason}" for plugin, reason in self._plugins.failed.items())

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


def _of(policy: Policy, field: str) -> str:
    variable = policy.variables.get(field)
    return f"the environment variable {variable}" if variable else f"{field} of the policy"


def _left_out(backend: TEXBackendBase, policy: Policy) -> str | None:
    """Why the policy lets ``backend`` serve nothing, or None."""
    names = vendor_names(backend)
    if not backend.REFERENCE and names & policy.deny_vendors:
        return f"the policy denies {', '.join(sorted(names & policy.deny_vendors))}"
    if backend.KIND == "vendor" and policy.allow_vendors is not None and not names & policy.allow_vendors:
        return f"the policy allows the vendors {', '.join(sorted(policy.allow_vendors))} alone"
    return None


def _show_selections() -> None:
    """Let the selections be seen by who asked for them and set up no logging of their own."""
    _log.setLevel(logging.INFO)
    if not _log.hasHandlers():
        _log.addHandler(logging.StreamHandler())


registry = Registry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=registry._after_fork)
