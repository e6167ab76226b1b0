"""``Service``: requests of asyncio's thread to the worker's, and what comes back to those who wait for it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

from fusible.cli.serving.calls import Call
from fusible.cli.serving.errors import ApiError, busy, closing, failed, invalid, late, of_argument
from fusible.cli.serving.limits import Limits
from fusible.cli.serving.worker import Piece, Ticket, Worker
from fusible.errors import ArgumentError
from fusible.models.generation import Engine, Request, Sampling
from fusible.models.text import ChatTemplate, TextStream, Tokenizer

__all__ = ["Answer", "Gone", "ServedModel", "Service"]

_COMPLETION = 16
"""The tokens of a completion that asks for no number, in OpenAI's interface; a chat goes on to the end of its context."""


class Gone(Exception):
    """The client has closed its connection."""


@dataclass
class ServedModel:
    """What is served under ``name``. ``defaults``: the sampling of requests that say nothing else."""

    name: str
    engine: Engine
    tokenizer: Tokenizer
    chat: ChatTemplate | None = None
    defaults: Sampling = field(default_factory=Sampling)
    created: int = field(default_factory=lambda: int(time.time()))


class Answer:
    """The pieces of the prompts of one call, as they come. Whoever has opened it closes it, in any case."""

    def __init__(self, service: Service, call: Call, prompts: list[tuple[int, ...]], tickets: list[Ticket], pieces: asyncio.Queue) -> None:
        self.call, self.prompts = call, prompts
        self._service, self._tickets, self._pieces = service, tickets, pieces
        self._left, self._open = len(tickets), True
        self._error: ApiError | Gone | None = None

    @property
    def done(self) -> bool:
        """Whether all prompts have ended."""
        return not self._left

    async def batch(self) -> list[tuple[int, Piece]]:
        """The next piece, and those behind it that are there. Raises what ``next`` raises; behind a piece, when it is called again."""
        pieces = [await self.next()]
        while not self.done and not self._pieces.empty():
            try:
                pieces.append(await self.next())
            except (ApiError, Gone) as error:
                self._error = error
                break
        return pieces

    async def next(self) -> tuple[int, Piece]:
        """The next piece, and the number of its prompt. Raises ``ApiError`` where one of them failed, ``Gone`` where nobody listens any longer."""
        if self._error is not None:
            raise self._error
        index, piece = await self._pieces.get()
        if piece is None:
            raise Gone
        error = self._service.error_of(piece)
        if error is not None:
            raise error
        self._left -= piece.ended is not None
        return index, piece

    def gone(self) -> None:
        """Tell whoever waits for a piece that the client is gone."""
        self._pieces.put_nowait((0, None))

    def close(self) -> None:
        """End what still runs, and let others have the room."""
        if self._open:
            self._open = False
            self._service.release(self._tickets)


class Service:
    """One model for many clients, within ``limits``. All but ``work`` runs in the thread of asyncio's loop."""

    def __init__(self, served: ServedModel, limits: Limits) -> None:
        self.served, self.limits, self.closing = served, limits, False
        self._worker = Worker(served.engine, limits, self._post)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open, self._ended = 0, False

    @property
    def open(self) -> int:
        """How many requests there are, those that wait included."""
        return self._open

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        return self._worker.alive and not self.closing

    def work(self) -> None:
        """Run the engine in this thread, until ``halt`` or ``stop``."""
        self._worker.work()

    def halt(self) -> None:
        """Tell ``work`` to end. Any thread may."""
        self._worker.stop()

    async def start(self) -> None:
        """Begin; from here on the service belongs to the loop that runs."""
        self._loop = asyncio.get_running_loop()

    async def stop(self) -> None:
        """End ``work``, and wait until it has."""
        self.halt()
        await asyncio.to_thread(self._worker.wait)

    def close(self) -> None:
        """Take no more requests, and end those that run after the time of grace. Signal handlers may call it."""
        if self._loop is not None and not self.closing:
            self.closing = True
            with suppress(RuntimeError):  # the loop is closed, so nothing runs
                self._loop.call_soon_threadsafe(self._loop.call_later, self.limits.grace_seconds, self._end)

    async def answer(self, call: Call) -> Answer:
        """Begin with a call. Raises ``ApiError`` where it cannot be served."""
        if call.model != self.served.name:
            do = "ask /v1/models for the name"
            raise invalid(repr(self.served.name), of="model", got=repr(call.model[:80]), do=do, status=404, code="model_not_found")
        count = max(1, len(call.prompts))
        if self.closing or not self._worker.alive:
            raise closing() if self.closing else failed()
        if count > self.limits.concurrency:
            raise invalid(
                f"at most {self.limits.concurrency}, the requests at once of this server", of="prompt", got=count, do="send several requests"
            )
        if self._open + count > self.limits.concurrency:
            raise busy(self.limits.concurrency)
        self._open += count  # before anything is waited for: others ask meanwhile
        try:
            prompts = await asyncio.to_thread(self._encoded, call)
            requests = [self._request(call, prompt) for prompt in prompts]
            if self._ended:
                raise closing()
        except BaseException:
            self._open -= count
            raise
        pieces: asyncio.Queue[tuple[int, Piece | None]] = asyncio.Queue()
        tickets = [self._ticket(call, index, request, pieces) for index, request in enumerate(requests)]
        for ticket in tickets:
            self._worker.submit(ticket)
        return Answer(self, call, prompts, tickets, pieces)

    def release(self, tickets: list[Ticket]) -> None:
        """Of an answer that is closed."""
        self._open -= len(tickets)
        for ticket in tickets:
            self._worker.cancel(ticket)

    def error_of(self, piece: Piece) -> ApiError | None:
        """What is answered to a request that ended without its text."""
        if piece.ended == "late":
            return late(self.limits.queue_seconds)
        return closing() if piece.ended == "closing" else failed() if piece.ended == "failed" else None

    def _encoded(self, call: Call) -> list[tuple[int, ...]]:
        tokenizer, chat = self.served.tokenizer, self.served.chat
        if call.messages and chat is None:
            raise invalid("a model with a chat template", of="messages", got="one without", do="send a prompt to /v1/completions")
        try:
            if chat is not None and call.messages:
                return [tuple(tokenizer.encode(chat.render(call.messages, **(call.template or {})), special=False))]
            return [tuple(tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt for prompt in call.prompts]
        except ArgumentError as error:
            raise of_argument(error, "messages" if call.messages else "prompt") from None

    def _request(self, call: Call, prompt: tuple[int, ...]) -> Request:
        """The engine's request, if it can be served."""
        engine, param = self.served.engine, "messages" if call.messages else "prompt"
        most = min(self.limits.max_tokens or engine.longest, engine.longest)
        if call.max_tokens is not None and call.max_tokens > most:
            raise invalid(f"at most {most}", of="max_tokens", got=call.max_tokens, do="give a smaller number")
        default = most if call.messages else _COMPLETION
        count = call.max_tokens or max(1, min(default, most, engine.longest - len(prompt)))
        try:
            request = Request(prompt, count, call.sampling, self.served.tokenizer.stop_tokens, call.logprobs)
            engine.check(request)
        except ArgumentError as error:
            too_long = len(prompt) + count > engine.longest
            raise of_argument(error, param, "context_length_exceeded" if too_long else None) from None
        return request

    def _ticket(self, call: Call, index: int, request: Request, pieces: asyncio.Queue[tuple[int, Piece | None]]) -> Ticket:
        # A chat's answer begins anew; the text of a completion goes on from the prompt, with the space that may be between them.
        stream = TextStream(self.served.tokenizer, call.stop, () if call.messages else request.prompt)
        return Ticket(request, stream, lambda piece: pieces.put_nowait((index, piece)))

    def _post(self, batch: list[tuple[Ticket, Piece]]) -> None:
        """Called by the thread that works."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed, so nobody waits
            self._loop.call_soon_threadsafe(_deliver, batch)

    def _end(self) -> None:
        self._ended = True
        self._worker.end_all()


def _deliver(batch: list[tuple[Ticket, Piece]]) -> None:
    for ticket, piece in batch:
        ticket.deliver(piece)
