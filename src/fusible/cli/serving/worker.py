"""``Worker``: what the one thread that uses the engine does. Others give it requests, and get pieces of text."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from fusible.cli.serving.limits import Limits
from fusible.models.generation import Engine, Event, Logprobs, Request
from fusible.models.text import TextStream

__all__ = ["Finish", "Piece", "Ticket", "Worker"]

_LOG = logging.getLogger("fusible.serve")
_TRIES = 2

Finish = Literal["stop", "length", "failed", "late", "closing"]
"""How a request ended: by a stop token or a stop string; with all its tokens or all its time; by an error; or because it waited too long, or the
server shuts down."""


@dataclass(frozen=True)
class Piece:
    """Further text of a request, with the ``tokens`` that it came from, and how many were ``made`` by now; ``ended`` with the last one."""

    text: str
    tokens: tuple[tuple[int, Logprobs | None], ...] = ()
    made: int = 0
    ended: Finish | None = None


@dataclass(eq=False)
class Ticket:
    """A request on its way through the worker, and where its pieces go: ``deliver`` is called in the thread that ``post`` brings them to."""

    request: Request
    stream: TextStream
    deliver: Callable[[Piece], None]
    since: float = field(default_factory=time.monotonic)
    number: int | None = None
    made: int = 0


class Worker:
    """Runs ``engine`` in the thread that calls ``work``. ``post`` takes the pieces of one step, and brings them to their thread."""

    def __init__(self, engine: Engine, limits: Limits, post: Callable[[list[tuple[Ticket, Piece]]], None]) -> None:
        self._engine, self._limits, self._post = engine, limits, post
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._pieces: list[tuple[Ticket, Piece]] = []
        self._stopped, self._failures = False, 0
        self._ended = threading.Event()

    @property
    def alive(self) -> bool:
        """Whether requests will be computed, if not yet: ``work`` has not ended."""
        return not self._ended.is_set()

    def work(self) -> None:
        """Compute what is asked for, until ``stop``."""
        try:
            while not self._stopped:
                self._turn()
        finally:
            self._ended.set()

    def submit(self, ticket: Ticket) -> None:
        """Take a request that the engine's ``check`` has let pass."""
        self._commands.put(lambda: self._add(ticket))

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for this request any longer. One that has ended is let be."""
        self._commands.put(lambda: self._drop(ticket))

    def end_all(self) -> None:
        """End every request: the server shuts down."""
        self._commands.put(lambda: self._finish_all("closing"))

    def stop(self) -> None:
        """Tell ``work`` to end."""
        self._commands.put(lambda: setattr(self, "_stopped", True))

    def wait(self) -> None:
        """Until ``work`` has ended."""
        self._ended.wait()

    def _turn(self) -> None:
        self._obey()
        if not self._stopped and self._engine.busy:
            self._expire()
            self._step()
        if self._pieces:  # of a whole step at once: waking the other thread costs more than a piece
            batch, self._pieces = self._pieces, []
            self._post(batch)

    def _obey(self) -> None:
        """Do what was asked; wait for it where there is nothing else to do."""
        if not self._engine.busy:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _add(self, ticket: Ticket) -> None:
        ticket.number = self._engine.add(ticket.request)
        self._tickets[ticket.number] = ticket

    def _drop(self, ticket: Ticket) -> None:
        if ticket.number is not None and self._tickets.pop(ticket.number, None) is not None:
            self._engine.cancel(ticket.number)

    def _finish(self, ticket: Ticket, ended: Finish, text: str = "") -> None:
        self._drop(ticket)
        self._pieces.append((ticket, Piece(text, (), ticket.made, ended)))

    def _finish_all(self, ended: Finish) -> None:
        for ticket in list(self._tickets.values()):
            self._finish(ticket, ended)

    def _expire(self) -> None:
        now, waiting = time.monotonic(), frozenset(self._engine.waiting)
        for number, ticket in list(self._tickets.items()):
            if number in waiting and now - ticket.since > self._limits.queue_seconds:
                self._finish(ticket, "late")
            elif number not in waiting and now - ticket.since > self._limits.request_seconds:
                self._finish(ticket, "length", ticket.stream.finish())

    def _step(self) -> None:
        """A step that raised is repeated once: it may have been short of memory for a moment. One that raised again is made for each request by
        itself, and ends those for which it raises."""
        try:
            events = self._engine.step()
        except Exception:
            self._failures += 1
            _LOG.exception("A step of the engine failed.")
            if self._failures >= _TRIES:
                self._failures = 0
                self._step_one_by_one()
            return
        self._failures = 0
        self._tell_all(events)

    def _step_one_by_one(self) -> None:
        running = self._engine.running
        if not running:  # nobody could begin
            self._finish_all("failed")
        if len(running) == 1:
            self._fail(running[0])
            return
        for number in running:
            try:
                events = self._engine.step(number)
            except Exception:
                _LOG.exception("A request failed by itself.")
                self._fail(number)
            else:
                self._tell_all(events)

    def _tell_all(self, events: list[Event]) -> None:
        for event in events:
            ticket = self._tickets.get(event.id)
            if ticket is not None:
                try:
                    self._tell(ticket, event)
                except Exception:  # of this one's text: the others go on
                    _LOG.exception("The text of a request failed.")
                    self._finish(ticket, "failed")

    def _fail(self, number: int) -> None:
        ticket = self._tickets.get(number)
        if ticket is None:
            self._engine.cancel(number)
        else:
            self._finish(ticket, "failed")

    def _tell(self, ticket: Ticket, event: Event) -> None:
        if event.token is None:
            self._finish(ticket, "failed")
            return
        ticket.made += 1
        stop_token = event.ended == "stop"  # ends the text, and is none of it
        text = "" if stop_token else ticket.stream.push(event.token)
        ended: Finish | None = "stop" if stop_token or ticket.stream.stopped else "length" if event.ended else None
        if ended:
            text += ticket.stream.finish()
            self._drop(ticket)
        tokens = () if stop_token else ((event.token, event.logprobs),)
        self._pieces.append((ticket, Piece(text, tokens, ticket.made, ended)))
