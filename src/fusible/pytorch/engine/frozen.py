"""A block of calls within which weights are promised not to change, so that 8-bit copies are vouched for once and not at each call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from fusible.errors import ValuesError, expected
from fusible.tex.backends.cpu import fingerprints

if TYPE_CHECKING:
    from fusible.pytorch.engine.weights import Fingerprint, WeightCopy

__all__ = ["FrozenWeights", "current_frozen_weights", "frozen_weights"]


class FrozenWeights:
    """The copies that were vouched for within a block, and the weights that they are of, with the fingerprints by which they were.

    Of a weight an alias is held, not the parameter: so its memory is not given to another while the block lasts, and one that is put in its place
    has another address, by which it is noticed at once.
    """

    def __init__(self) -> None:
        self._copies: WeakSet[WeightCopy] = WeakSet()
        self._weights: dict[tuple[int, torch.Size, Fingerprint], torch.Tensor] = {}

    def vouches_for(self, copy: WeightCopy) -> bool:
        """Whether a copy of a weight that looks the same still was vouched for in this block."""
        return copy in self._copies

    def keep(self, copy: WeightCopy, weight: torch.Tensor) -> None:
        """Note that a copy is one of a weight as it is now: its fingerprint has been taken just now."""
        if copy.fingerprint is not None:
            self._copies.add(copy)
            self._weights.setdefault((weight.data_ptr(), weight.shape, copy.fingerprint), weight.detach())

    def changed(self) -> list[torch.Tensor]:
        """The weights that hold other bytes than those that copies were made of. All are read."""
        now = fingerprints(list(self._weights.values())) if self._weights else None
        return [weight for ((*_, then), weight), found in zip(self._weights.items(), now or [], strict=True) if found != then]


_current: ContextVar[FrozenWeights | None] = ContextVar("frozen weights", default=None)


def current_frozen_weights() -> FrozenWeights | None:
    """Those of the block that this thread is in, or None."""
    return _current.get()


@contextmanager
def frozen_weights() -> Iterator[None]:
    """Within this block, weights do not change: ``with fusible.frozen_weights(): model.generate(...)``.

    An 8-bit copy of a weight is used again while the weight holds the bytes that it was made of, and to know that, a call reads them: of one token,
    that is most of its time. Here each weight is read at its first call, and once more at the end of the block. A change in between that torch
    counts, or another weight in the place of one, is noticed at the next call, as elsewhere. One that nothing counts (to ``weight.data``, to a numpy
    array over it, of another process) is noticed at the end: raises ``ValuesError`` then, for what was computed may be of the former weights. Where
    the block raises by itself, its error gets that as a note.

    It holds for calls of the thread that opens it, of weights in the memory of the CPU.
    """
    frozen = FrozenWeights()
    token = _current.set(frozen)
    try:
        yield
    except BaseException as error:
        wrong = _complaint(frozen)
        if wrong:
            error.add_note(wrong)
        raise
    finally:
        _current.reset(token)
    wrong = _complaint(frozen)
    if wrong:
        raise ValuesError(wrong)


def _complaint(frozen: FrozenWeights) -> str:
    changed = frozen.changed()
    if not changed:
        return ""
    got = f"{len(changed)} that changed, of shape {list(changed[0].shape)} the first"
    return expected(
        "weights that stay as they are", of="frozen_weights", got=got, do="compute anew what was computed inside, and change weights outside"
    )
