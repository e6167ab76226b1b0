"""A context that makes signals wait, for writes that have to happen as a whole but cannot be one call of a function in C."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["uninterrupted"]


class uninterrupted:
    """While open in the main thread, handlers of signals that are written in Python (Ctrl-C's among them) wait; they are called at the end, in the
    order of the signals. Elsewhere it does nothing: Python handles signals in the main thread. It holds no exception off that a debugger, a
    tracing function or another thread raises (``PyThreadState_SetAsyncExc``)."""

    def __init__(self) -> None:
        self._former: dict[int, Any] = {}
        self._came: list[int] = []

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._former = {number: handler for number, handler in handlers.items() if callable(handler)}
        try:
            for number in self._former:
                signal.signal(number, self._note)
        except BaseException:  # one that came before its handler was changed
            self._restore()
            raise

    def __exit__(self, *_: Any) -> None:
        self._restore()
        came, self._came = self._came, []
        for number in came:
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)
