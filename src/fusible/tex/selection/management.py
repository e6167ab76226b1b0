"""Choosing backends from a program: ``get_backend``, ``set_backend``, ``list_backends``, ``set_policy``."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any
from weakref import ref

from fusible.errors import ArgumentError, check_switch, expected
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.selection.policy import Policy
from fusible.tex.selection.registry import registry
from fusible.tex.selection.scope import Scope, here, update_here

__all__ = ["coverage", "get_backend", "get_policy", "list_backends", "register_backend", "set_backend", "set_policy"]

register_backend = registry.register_backend


class _Change:
    """A change of policy: of the process when it is called for, of one thread or task while it is entered by ``with``.

    ``with set_backend("x")`` makes the object before it enters it, and the process must see nothing of it in between. So outside of any ``with`` a
    change waits: it is entered next, or the caller drops the object (a plain call does at once), or goes on with tex and so means a plain call.
    Within a ``with``, a plain call changes the policy of that ``with``, which ends with it.
    """

    def __init__(self, make: Callable[[Policy], Policy]) -> None:
        self._waits = False
        registry.load_plugins()
        registry.check(make(registry.policy))  # settles a change that waits here
        self._make = make
        self._done: tuple[Policy, Policy] | None = None
        self._scopes: tuple[Scope, Scope] | None = None
        now = here.get()
        if now is None or not now.entered:
            self._waits = True
            update_here(pending=ref(self))
        else:
            owner, former = now.entered[-1]
            self._scopes = former, registry.scope_of(make(former.policy))
            update_here(entered=(*now.entered[:-1], (owner, self._scopes[1])))

    def commit(self) -> None:
        """Put the change in force for the process, unless it was entered or settled before."""
        if self._waits:
            self._waits = False
            self._done = registry.put_policy(self._make)

    def __del__(self) -> None:
        if self._waits:
            now = here.get()
            if now is not None and now.pending is not None and now.pending() in (None, self):
                update_here(pending=None)
            self.commit()

    def _undo(self) -> None:
        """Put back what a plain call changed, if nothing else was put in force since."""
        if self._done is not None:
            former, made = self._done
            registry.take_back(made, former)
        now = here.get()
        if self._scopes is not None and now is not None and now.entered and now.entered[-1][1] is self._scopes[1]:
            update_here(entered=(*now.entered[:-1], (now.entered[-1][0], self._scopes[0])))
        self._done = self._scopes = None

    def __enter__(self) -> TEXBackendBase:
        if self._waits:
            self._waits = False
            update_here(pending=None)
        self._undo()
        entered = registry.scope_of(self._make(registry.policy))
        now = here.get()
        update_here(entered=(*(now.entered if now is not None else ()), (self, entered)))
        try:
            return registry.current()
        except BaseException:  # no __exit__ follows
            self.__exit__(None, None, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        now = here.get()
        entered = list(now.entered) if now is not None else []
        own = [place for place, (owner, _) in enumerate(entered) if owner is self]
        if own:
            del entered[own[-1]]
            update_here(entered=tuple(entered))
        else:
            self.commit()
            self._undo()


def get_backend() -> TEXBackendBase:
    """The backend in force: the forced one, else the best that is available (``name``, ``vendor``, ``priority``)."""
    return registry.current()


def get_policy() -> Policy:
    """The policy in force."""
    return registry.policy


def set_backend(name: str | None, *, strict: bool | None = None) -> _Change:
    """Force the backend ``name`` (None: force none) for every call that it serves, at once.

    A plain call does so for the whole process. ``with set_backend(...)`` does so for the calling thread or asynchronous task alone, until the context
    ends; a plain call within it changes the policy of that ``with``. A thread that is started within begins with the process's policy, an
    asynchronous task with the one in force where it is made, a backward pass on a thread of torch's with that of its forward pass.

    What the backend lacks goes to the fallback backend, then to the others by priority, unless ``strict``. Raises ``BackendError`` for an unknown or
    unavailable name; the policy then stays as it was.
    """
    check_switch(strict, "strict of set_backend", optional=True)
    changes: dict[str, Any] = {"forced": name}
    if strict is not None:
        changes["strict"] = strict
    return _Change(lambda policy: policy.changed(**changes))


def set_policy(policy: Policy | None = None, **per_function: str | tuple[str, ...]) -> _Change:
    """Put a policy in force (None: what the environment says), or name the backends of single functions: ``set_policy(gelu="torch")``.

    For the process or within a ``with``, as ``set_backend``. Raises ``BackendError`` for an unknown or unavailable backend, ``ArgumentError`` for an
    unknown function.
    """
    unknown = sorted(set(per_function) - set(DECLARATIONS))
    if unknown:
        raise ArgumentError(expected("functions of tex", of="a policy", got=", ".join(unknown), do="look the names up in dir(tex)"))
    if policy is not None and not isinstance(policy, Policy):
        raise ArgumentError(expected("a tex.Policy or None", of="set_policy", got=repr(policy), do="pass one of those"))
    if policy is None and per_function:
        return _Change(lambda former: former.changed(per_function={**former.per_function, **per_function}))
    wanted = policy if policy is not None else Policy.from_environment()
    wanted = wanted.changed(per_function={**wanted.per_function, **per_function}) if per_function else wanted
    return _Change(lambda _: wanted)


def list_backends() -> list[dict[str, Any]]:
    """A dict per backend, best first: name, vendor, priority, available, reason (when not available), current."""
    current = registry.current()
    rows = []
    for backend in registry.ordered():
        reason = registry.reason_unavailable(backend)
        rows.append(
            {
                "name": backend.NAME,
                "vendor": backend.vendor,
                "priority": backend.priority,
                "available": reason is None,
                "reason": reason,
                "current": backend is current,
            }
        )
    return rows


def coverage() -> dict[str, dict[str, str | None]]:
    """Every declared function, and of each backend (best first) why it does not serve it, or None where it does, for some arguments at least.

    ``tex.explain`` answers for one call.
    """
    backends = registry.ordered()
    missing = {backend.NAME: registry.reason_unavailable(backend) for backend in backends}

    def reason(backend: TEXBackendBase, function: str) -> str | None:
        absent = missing[backend.NAME]
        lacking = backend.lacks(function)
        return lacking if lacking is not None else f"unavailable: {absent}" if absent is not None else None

    return {name: {backend.NAME: reason(backend, name) for backend in backends} for name in sorted(DECLARATIONS)}
