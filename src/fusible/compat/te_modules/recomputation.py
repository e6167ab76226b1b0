"""``checkpoint``: activations that are made again in backward, under the recipe of the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.utils.checkpoint

from fusible.compat.te_modules.parallel import refuse
from fusible.pytorch.engine.autocast import OUTSIDE, autocast, current_autocast
from fusible.pytorch.engine.repetition import Repetition

__all__ = ["checkpoint"]


class _Repeated:
    """A function that is called again in backward: within the ``autocast`` of the first call, by the scales that it saw, and with the random states
    that its tracker had."""

    def __init__(self, function: Callable[..., Any], get_tracker: Callable[[], Any] | None) -> None:
        self._function, self._get_tracker = function, get_tracker
        self._context: Any = None
        self._repetition = Repetition()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._context is None:
            found = current_autocast()
            self._context = autocast(enabled=False) if found is OUTSIDE else found  # outside, a repeated call would follow the latest one
            self._states = None if self._get_tracker is None else self._get_tracker().get_states()
            with self._repetition.first():
                return self._function(*args, **kwargs)
        with self._context, self._tracked(), self._repetition.again():
            return self._function(*args, **kwargs)

    def _tracked(self) -> Any:
        return nullcontext() if self._get_tracker is None else _with_states(self._get_tracker(), self._states)


@contextmanager
def _with_states(tracker: Any, states: Any) -> Iterator[None]:
    now = tracker.get_states()
    tracker.set_states(states)
    try:
        yield
    finally:
        tracker.set_states(now)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, of which only the arguments are kept for backward: it is called again there, by the scales of the first time,
    however many calls of its modules await their backward.

    Options, taken out of ``kwargs``: ``get_rng_state_tracker``, ``context_fn``, ``determinism_check`` and ``debug`` as ``torch.utils.checkpoint`` has
    them. ``use_reentrant`` and ``tp_group`` change no result: a pass records gradients from the first, so that delayed scaling observes it when it is
    made. ``NotServedError``: ``distribute_saved_activations``.
    """
    refuse("checkpoint", "keep the activations whole", distribute_saved_activations=kwargs.pop("distribute_saved_activations", False))
    for name in ("use_reentrant", "tp_group"):
        kwargs.pop(name, None)
    repeated = _Repeated(function, kwargs.pop("get_rng_state_tracker", None))
    return torch.utils.checkpoint.checkpoint(repeated, *args, use_reentrant=False, **kwargs)
