"""Ctrl-C, and a launcher's SIGTERM, as a request to stop after the current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

__all__ = ["Interruption"]


class Interruption:
    """``with Interruption() as interruption: ...``: the first Ctrl-C or SIGTERM sets ``asked``; another raises ``KeyboardInterrupt`` where it
    strikes.

    Outside the main thread, where Python allows no signal handlers, nothing is changed.
    """

    def __init__(self) -> None:
        self.asked = False
        self._former: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
