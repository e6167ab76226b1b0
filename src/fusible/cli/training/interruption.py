"""Ctrl-C as a request to stop after the current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

__all__ = ["Interruption"]


class Interruption:
    """``with Interruption() as interruption: ...``: the first Ctrl-C sets ``asked``; the second raises ``KeyboardInterrupt`` where it strikes.

    Outside the main thread, where Python allows no signal handlers, nothing is changed.
    """

    def __init__(self) -> None:
        self.asked = False
        self._former: Callable[[int, FrameType | None], object] | int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._former is not None:
            signal.signal(signal.SIGINT, self._former)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
