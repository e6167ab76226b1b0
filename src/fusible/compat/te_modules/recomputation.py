"""``checkpoint``: activations that are made again in backward, under the recipe of the first time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.utils.checkpoint

from fusible.compat.te_modules.parallel import refuse
from fusible.pytorch.engine.autocast import current_autocast

__all__ = ["checkpoint"]


class _Repeated:
    """A function that is called again in backward: within the ``autocast`` of the first call, and with the random states that its tracker had."""

    def __init__(self, function: Callable[..., Any], get_tracker: Callable[[], Any] | None) -> None:
        self._function, self._get_tracker = function, get_tracker
        self._context: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._context is None:
            self._context = current_autocast()
            self._states = None if self._get_tracker is None else self._get_tracker().get_states()
            return self._function(*args, **kwargs)
        with self._context, self._tracked():
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
    """``function(*args, **kwargs)``, of which only the arguments are kept for backward: it is called again there.

    Options, taken out of ``kwargs``: ``use_reentrant`` (True), ``get_rng_state_tracker``, ``context_fn``, ``determinism_check`` and ``debug`` as
    ``torch.utils.checkpoint`` has them; ``tp_group``. ``NotServedError``: ``distribute_saved_activations``.
    """
    reentrant = kwargs.pop("use_reentrant", True)
    refuse("checkpoint", "keep the activations whole", distribute_saved_activations=kwargs.pop("distribute_saved_activations", False))
    kwargs.pop("tp_group", None)
    repeated = _Repeated(function, kwargs.pop("get_rng_state_tracker", None))
    options = {name: kwargs.pop(name) for name in ("context_fn", "determinism_check", "debug") if name in kwargs}
    called = functools.partial(repeated, **kwargs) if kwargs and reentrant else repeated
    return torch.utils.checkpoint.checkpoint(called, *args, use_reentrant=reentrant, **options, **({} if reentrant else kwargs))
