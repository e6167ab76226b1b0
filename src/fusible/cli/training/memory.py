"""Peak memory of a stretch of the program."""

from __future__ import annotations

import os
import resource
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["PeakMemory"]

_STATM = Path("/proc/self/statm")


class PeakMemory:
    """``with PeakMemory() as memory: ...``: ``memory.peak`` is the largest resident set of the whole process seen meanwhile, in bytes.

    A thread looks every ``interval`` seconds, so a shorter peak can be missed. All of the process counts: the interpreter, libraries (some
    hundred MB for torch), and what earlier work left with the allocator. Where there is no ``/proc`` the peak is that since the process began.
    """

    def __init__(self, interval: float = 0.02) -> None:
        self.peak = 0
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.peak = _resident()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, _resident())

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self.peak = max(self.peak, _resident())


def _resident() -> int:
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
