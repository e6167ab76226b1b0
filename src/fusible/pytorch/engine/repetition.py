"""A forward that is made again in backward takes the scales of its first time, whatever has closed iterations meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusible.pytorch.engine.scaling import ScalingOwner, Snapshot

__all__ = ["Repetition", "current_repetition"]


class Repetition:
    """The scaling states that the calls of one forward saw, of each owner in their order: ``first`` keeps them, ``again`` hands them out.

    What is repeated has been observed already: its snapshots are marked, and nothing is committed. A call beyond those that were kept (of an owner
    that came since, or of a function that goes another way) is as any other.
    """

    def __init__(self) -> None:
        self._kept: dict[ScalingOwner, list[Snapshot]] = {}

    @contextmanager
    def first(self) -> Iterator[None]:
        """Within it the forward is made for the first time. It may itself be a part of one that is repeated."""
        around = _current.get()

        def keep(owner: ScalingOwner, make: Callable[[], Snapshot]) -> Snapshot:
            snapshot = make() if around is None else around(owner, make)
            self._kept.setdefault(owner, []).append(snapshot)
            return snapshot

        with _opened(keep):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within it the forward is repeated, from its beginning."""
        left = {owner: iter(snapshots) for owner, snapshots in self._kept.items()}

        def hand_out(owner: ScalingOwner, make: Callable[[], Snapshot]) -> Snapshot:
            kept = next(left.get(owner, iter(())), None)
            return make() if kept is None else replace(kept, repeated=True)

        with _opened(hand_out):
            yield


_Source = Callable[["ScalingOwner", Callable[[], "Snapshot"]], "Snapshot"]
_current: ContextVar[_Source | None] = ContextVar("fusible_repetition", default=None)


def current_repetition() -> _Source | None:
    """What gives the snapshot of a call, of its owner and of what would make it elsewhere; None where no ``Repetition`` is open."""
    return _current.get()


@contextmanager
def _opened(source: _Source) -> Iterator[None]:
    token = _current.set(source)
    try:
        yield
    finally:
        _current.reset(token)
