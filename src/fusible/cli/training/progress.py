"""The progress of a run: a bar on a terminal, about ten plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Bars", "Lines", "ProgressView", "make_progress"]

_LINES = 10


class ProgressView(Protocol):
    """Follows the steps of one run after another."""

    def begin(self, name: str, done: int, total: int, tokens: int) -> None:
        """A run of ``total`` steps starts or goes on at ``done``; a step is ``tokens`` tokens."""
        ...

    def step(self, loss: float) -> None:
        """One more step is done."""
        ...

    def end(self) -> None:
        """No more steps of this run will come."""
        ...


class Bars:
    """A bar per run with loss, tokens per second and the time that remains."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, name: str, done: int, total: int, tokens: int) -> None:
        figures = TextColumn("{task.fields[figures]}")
        columns = TextColumn("{task.description:<8}"), BarColumn(), MofNCompleteColumn(), figures, TimeRemainingColumn()
        self._progress = Progress(*columns, console=self._console)
        self._task = self._progress.add_task(name, completed=done, total=total, figures="")
        self._tokens, self._steps, self._began = tokens, 0, time.perf_counter()
        self._progress.start()

    def step(self, loss: float) -> None:
        self._steps += 1
        rate = self._tokens * self._steps / (time.perf_counter() - self._began)
        self._progress.update(self._task, advance=1, figures=f"loss {loss:.3f}  {rate:,.0f} tokens/s")

    def end(self) -> None:
        self._progress.stop()


class Lines:
    """About ten lines per run, for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, name: str, done: int, total: int, tokens: int) -> None:
        self._name, self._done, self._total, self._tokens = name, done, total, tokens
        self._every = max(1, (total + _LINES - 1) // _LINES)
        self._shown, self._since = done, time.perf_counter()

    def step(self, loss: float) -> None:
        self._done += 1
        if self._done % self._every and self._done != self._total:
            return
        now = time.perf_counter()
        rate = self._tokens * (self._done - self._shown) / (now - self._since)
        self._console.print(f"{self._name:<8} step {self._done}/{self._total}  loss {loss:.3f}  {rate:,.0f} tokens/s")
        self._shown, self._since = self._done, now

    def end(self) -> None:
        pass


def make_progress(console: Console) -> ProgressView:
    """What suits the console."""
    return Bars(console) if console.is_terminal else Lines(console)
