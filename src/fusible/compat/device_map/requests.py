"""Point-to-point communication as NCCL's users know it: a request may be waited for again, and those of a coalesced block are waited for together.

Gloo's own waits count: a second one is for a second message, and without one it never returns. NCCL's name a place in a stream, which is passed
once and for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fusible.locks import Lock

__all__ = ["Requests"]


def _kept_work() -> type[Any]:
    """A subclass of ``torch.distributed.Work`` that waits for the wrapped request once. Made on call, as torch may be built without that class."""

    class KeptWork(torch.distributed.Work):
        def __init__(self, work: Any) -> None:
            super().__init__()
            self._work = work
            self._lock = Lock()
            self._done = False

        def wait(self, *timeout: Any, **named: Any) -> bool:
            with self._lock:
                self._done = self._done or bool(self._work.wait(*timeout, **named))
            return self._done

        def synchronize(self) -> None:
            self.wait()

        def block_current_stream(self) -> None:
            self.wait()

        def is_completed(self) -> bool:
            return self._done or self._work.is_completed()

    def told_by(name: str) -> Callable[..., Any]:
        return lambda self, *args: getattr(self._work, name)(*args)

    for name in ("exception", "get_future", "get_future_result", "is_success", "result", "source_rank", "_source_rank"):
        if hasattr(torch.distributed.Work, name):
            setattr(KeptWork, name, told_by(name))
    return KeptWork


class Requests:
    """The requests to send and receive of all process groups while the device is mapped."""

    def __init__(self) -> None:
        self._work = _kept_work()
        self._together: dict[Any, list[Any]] = {}
        """By process group: the requests of the coalesced block that is open for it."""

    def kept(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, a method of ``ProcessGroup`` that sends or receives, with a request that may be waited for again."""

        @functools.wraps(function)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = self._work(function(group, *args, **kwargs))
            if group in self._together:
                self._together[group].append(work)
            return work

        return call

    def coalescing(self, manager: Callable[..., Any], default: Callable[[], Any]) -> Callable[..., Any]:
        """``manager``, torch's own of communication that goes together, for a backend that has a function of each kind of collective in the place of
        a way to put any together: it is told of no device, and what is sent and received in its block is waited for with it. ``default``: what
        gives the group that is meant where none is named."""

        @functools.wraps(manager)
        @contextmanager
        def manage(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
            group = group or default()
            with manager(group, None, async_ops) as works:
                requests = self._together[group] = []
                try:
                    yield works
                finally:
                    del self._together[group]
            for request in requests:
                if async_ops:
                    works.append(request)
                else:
                    request.wait()

        return manage
