"""The running pass: what functions may know of it, and where quantization reads its scales and leaves its amaxes.

A pass is per thread and per call. Functions outside of any pass see ``Pass("inference")`` without scales.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, Literal, TypeVar

from fusible.errors import ArgumentError, expected

__all__ = ["Pass", "PassKind", "current_pass", "pass_", "running", "set_execution_state"]

PassKind = Literal["forward", "backward", "inference"]

_T = TypeVar("_T")


class Pass:
    """One execution of a pass: its ``kind``, the ``scales`` by slot (fp32 ``[1]``), and the ``amaxes`` by slot that quantization observed.

    ``caches``: of keys and values, by the position of their op. ``sums``: gradients so far of parameters, ``<position>.<name>``, to which the pass
    adds. ``memo``: what one op has computed and others need (``once``). ``call``: what an op keeps from forward to backward beside tensors.
    """

    __slots__ = ("amaxes", "caches", "call", "kind", "memo", "scales", "sums")

    def __init__(
        self,
        kind: PassKind,
        scales: Mapping[str, Any] | None = None,
        caches: Mapping[int, Any] | None = None,
        sums: Mapping[str, Any] | None = None,
        call: dict[Any, Any] | None = None,
    ) -> None:
        self.kind: PassKind = kind
        self.scales: Mapping[str, Any] = scales if scales is not None else {}
        self.caches: Mapping[int, Any] = caches if caches is not None else {}
        self.sums: Mapping[str, Any] = sums if sums is not None else {}
        self.amaxes: dict[str, Any] = {}
        self.memo: dict[Any, Any] | None = {}
        self.call: dict[Any, Any] = call if call is not None else {}

    def run(self, body: Callable[[], _T]) -> _T:
        """``body()`` as this pass, which is over when the call is, however that ends: an interrupt finds no line between the two.

        Context variables that ``body`` sets are its own, as a task's are: they are as they were afterwards.
        """
        return copy_context().run(self._run, body)

    def _run(self, body: Callable[[], _T]) -> _T:
        _running.set(self)
        return body()

    def once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """``make()``, or what it gave for ``key`` in this pass before: for what several ops need, as the angles of rotary positions."""
        if self.memo is None:
            return make()
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def scale(self, slot: str) -> Any:
        """The scale of a slot. Raises ``ArgumentError`` where the pass has none of that name."""
        try:
            return self.scales[slot]
        except KeyError:
            raise ArgumentError(
                expected(f"a scale named {slot!r}", of="the running pass", got=f"{sorted(self.scales) or 'none'}", do="run inside nvte.running(Pass)")
            ) from None


_running: ContextVar[Pass | None] = ContextVar("fusible_running_pass", default=None)
_OUTSIDE = Pass("inference")
_OUTSIDE.memo = None  # what is computed outside of any pass would be kept for ever


def current_pass() -> Pass:
    """The pass that runs in this thread."""
    return _running.get() or _OUTSIDE


def pass_() -> PassKind:
    """The kind of the pass that runs in this thread."""
    return current_pass().kind


def set_execution_state(state: Pass | None) -> Pass | None:
    """Make ``state`` the running pass of this thread (None: no pass) and return the former one. Prefer ``running``, or ``Pass.run``."""
    former = _running.get()
    _running.set(state)
    return former


@contextmanager
def running(state: Pass) -> Generator[Pass]:
    """Run the body as ``state``."""
    former = set_execution_state(state)
    try:
        yield state
    finally:
        set_execution_state(former)
