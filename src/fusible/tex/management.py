"""Choosing backends from a program: ``get_backend``, ``set_backend``, ``list_backends``, ``set_policy``."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.policy import Policy
from fusible.tex.registry import registry

__all__ = ["coverage", "get_backend", "get_policy", "list_backends", "register_backend", "set_backend", "set_policy"]

register_backend = registry.register_backend


class _Restore:
    """Puts the former policy back when used as a context manager; otherwise the change stays."""

    def __init__(self, former: Policy) -> None:
        self._former = former

    def __enter__(self) -> TEXBackendBase:
        return registry.current()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        registry.set_policy(self._former)


def get_backend() -> TEXBackendBase:
    """The backend in force: the forced one, else the best that is available (``name``, ``vendor``, ``priority``)."""
    return registry.current()


def get_policy() -> Policy:
    """The policy in force."""
    return registry.policy


def set_backend(name: str | None, *, strict: bool | None = None) -> _Restore:
    """Force the backend ``name`` (None: force none) for every call that it serves, at once and for the whole process.

    What it lacks goes to the fallback backend, then to the others by priority, unless ``strict``. Usable as a context manager, which puts the former
    policy back. Raises ``BackendError`` for an unknown or unavailable name; the policy then stays as it was.
    """
    changes: dict[str, Any] = {"forced": name}
    if strict is not None:
        changes["strict"] = strict
    return _Restore(registry.update_policy(**changes))


def set_policy(policy: Policy | None = None, **per_function: str) -> _Restore:
    """Put a policy in force (None: what the environment says), or name the backend of single functions: ``set_policy(gelu="torch")``.

    Usable as a context manager. Raises ``BackendError`` for an unknown or unavailable backend, ``ArgumentError`` for an unknown function.
    """
    unknown = sorted(set(per_function) - set(DECLARATIONS))
    if unknown:
        raise ArgumentError(expected("functions of tex", of="a policy", got=", ".join(unknown), do="look the names up in dir(tex)"))
    if policy is None and per_function:
        return _Restore(registry.update_policy(per_function={**registry.policy.per_function, **per_function}))
    return _Restore(registry.set_policy(policy))


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
