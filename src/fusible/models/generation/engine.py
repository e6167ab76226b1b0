"""``Engine``: many requests at once, by continuous batching over one cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusible.errors import ArgumentError, expected
from fusible.models.generation.next_token_model import NextTokenModel, check_next_token_model
from fusible.models.generation.request import Ended, Event, Logprobs, Request
from fusible.models.generation.sampling import Sampler, choose_tokens
from fusible.models.generation.slots import Slots
from fusible.models.generation.weights_as_seen import weights_as_seen
from fusible.models.prefix import common_prefix

__all__ = ["Engine", "EngineCounts"]


@dataclass
class EngineCounts:
    """What an engine has done: calls of its model, tokens that these computed, tokens that were chosen, tokens of prompts that were there already,
    and requests that had to give their pages to older ones."""

    calls: int = 0
    computed: int = 0
    chosen: int = 0
    reused: int = 0
    preempted: int = 0


@dataclass(eq=False)
class _Running:
    """A request on its way. Of ``tokens``, prompt and text, the cache has the first ``read``. ``weights``: the number of those that it began with."""

    id: int
    request: Request
    sampler: Sampler
    tokens: list[int]
    slot: int = -1
    read: int = 0
    weights: int = 0
    begun: bool = False

    @property
    def unread(self) -> int:
        return len(self.tokens) - self.read

    @property
    def made(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


@dataclass
class _Queues:
    waiting: dict[int, _Running] = field(default_factory=dict)
    running: dict[int, _Running] = field(default_factory=dict)
    """By id, which is the order of arrival."""


class Engine:
    """Goes on from prompts with ``model``: up to ``sequences`` requests at once, of at most ``capacity`` tokens each, prompt and text.

    Each ``step`` is one call of the model: a token of every text that grows, and of prompts what ``tokens_per_step`` leaves, in the order of
    arrival. So a long prompt is read in pieces while others go on, and a request begins as soon as one before it has ended. ``page_size`` and
    ``pages`` are those of the ``KVCache``. Where pages run out, the youngest request gives its own back, waits, and is computed again later: no
    request is lost, and the oldest always moves. A prompt that begins as a sequence that ended before goes on from what is kept of that; one that
    begins as a running one shares its pages. That holds of requests that began with the weights that the model has: where torch has counted a change
    since, or a weight was replaced, what begins is computed anew, and ``forget`` says so of a change that nothing counts.

    What a request gets hangs on its own prompt, parameters and seed: others in the batch change it by what rounding does, and by no more, if the
    model's recipe takes no scale from the whole batch. One thread at a time may use an engine.
    """

    def __init__(
        self,
        model: NextTokenModel,
        *,
        sequences: int = 8,
        capacity: int | None = None,
        page_size: int | None = None,
        pages: int | None = None,
        tokens_per_step: int = 512,
    ) -> None:
        check_next_token_model(model)
        self.capacity = model.context if capacity is None else capacity
        if self.capacity > model.context:
            wanted = f"at most {model.context}, the context of the model"
            raise ArgumentError(expected(wanted, of="capacity", got=self.capacity, do="give a smaller one"))
        if tokens_per_step < 1:
            raise ArgumentError(expected("at least 1", of="tokens_per_step", got=tokens_per_step, do="give a larger number"))
        self.counts = EngineCounts()
        self._model, self._sequences, self._budget = model, sequences, tokens_per_step
        self.cache = model.new_cache(sequences, self.capacity, page_size, pages)
        self._pages = pages or sequences * self.cache.pages_per_sequence
        self.longest = min(self.capacity, self._pages * self.cache.page_size)
        self._slots = Slots(self.cache)
        self._queues, self._next, self._cancelled = _Queues(), 0, list[int]()
        self._weights, self._seen = 0, weights_as_seen(model)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The requests of which nothing has been computed yet."""
        return tuple(id for id, one in self._queues.waiting.items() if not one.begun)

    @property
    def running(self) -> tuple[int, ...]:
        """The requests that hold a slot, in the order of arrival."""
        return tuple(sorted(self._queues.running))

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._queues.waiting or self._queues.running or self._cancelled)

    def check(self, request: Request) -> None:
        """Raise ``ArgumentError`` for a request that could never end: of more tokens than ``capacity`` or all pages hold, or of tokens that are
        none. Any thread may ask."""
        needed = len(request.prompt) + request.max_tokens
        if needed > self.longest:
            got = f"{len(request.prompt)} tokens of the prompt and {request.max_tokens} to add"
            error = ArgumentError(expected(f"at most {self.longest} tokens in all", of="prompt and max_tokens", got=got, do="give fewer"))
            error.argument = "max_tokens"
            raise error
        wrong = next((token for token in request.prompt if not 0 <= token < self._model.vocabulary), None)
        if wrong is not None:
            wanted = f"tokens from 0 to {self._model.vocabulary - 1}"
            raise ArgumentError(expected(wanted, of="prompt", got=wrong, do="use the tokenizer of this model"))

    def add(self, request: Request) -> int:
        """Take a request, and give its number, by which events and ``cancel`` name it. Raises what ``check`` raises."""
        self.check(request)
        id, self._next = self._next, self._next + 1
        self._queues.waiting[id] = _Running(id, request, Sampler(request.sampling, request.prompt), list(request.prompt))
        return id

    def cancel(self, id: int) -> None:
        """End a request; its event comes with the next step. One that has ended, or never was, is let be."""
        if id in self._queues.running:
            self._end(self._queues.running[id])
        elif self._queues.waiting.pop(id, None) is None:
            return
        self._cancelled.append(id)

    def forget(self) -> None:
        """Share nothing of requests that have begun, or have ended, with those that begin from here on."""
        self._slots.forget()
        self._weights += 1

    def step(self, alone: int | None = None) -> list[Event]:
        """Call the model once, and say what came of it. If that raises, nothing has changed but for prompts that were begun: a step may be
        repeated. ``alone``: the one of ``running`` that it is for; the others stay as they are, and nobody begins."""
        events, self._cancelled = [Event(id, ended="cancelled") for id in self._cancelled], []
        try:
            if alone is None:
                self._admit()
            counts = self._shares(alone)
            if counts:
                self._slots.make_room(self._per_slot(counts))
                events += self._advance(counts, self._logits(counts))
        except BaseException:
            self._undo()
            self._cancelled = [event.id for event in events if event.ended == "cancelled"]
            raise
        return events

    def _undo(self) -> None:
        """Whoever has read all tokens, and has not got the next one, reads the last once more."""
        for one in self._queues.running.values():
            if not one.unread:
                one.read -= 1
                self.cache.truncate(one.slot, one.read)
        self._slots.restore()

    def run(self) -> Iterator[Event]:
        """The events of all steps until nothing is left to do."""
        while self.busy:
            yield from self.step()

    def _admit(self) -> None:
        """Give slots to those who wait, in the order of arrival, while there are pages for all that they have to read."""
        waiting, running, pages_of = self._queues.waiting, self._queues.running, self._slots.pages_of
        if not waiting or not self._slots.resting:
            return
        self._look()
        taken = {other.slot: other.tokens[: other.read] for other in running.values() if other.weights == self._weights}
        promised = sum(pages_of(len(other.tokens)) - pages_of(other.read) for other in running.values())
        for one in sorted(waiting.values(), key=lambda one: one.id):
            if not self._slots.resting:
                return
            place = self._slots.find(one.tokens, taken)
            if self._soon(one, place.length):
                continue
            shared = 0 if place.slot == place.source else pages_of(place.length)
            if running and pages_of(len(one.tokens)) - shared + promised > self._slots.free_pages():
                return
            self._slots.take(place)
            del waiting[one.id]
            one.slot, one.read, one.begun, one.weights = place.slot, self.cache.lengths[place.slot], True, self._weights
            self.counts.reused += one.read
            running[one.id] = one
            taken[one.slot] = one.tokens[: one.read]
            promised += pages_of(len(one.tokens)) - pages_of(one.read)

    def _look(self) -> None:
        """Forget keys and values of weights that the model no longer has."""
        now = weights_as_seen(self._model)
        if now != self._seen:
            self.forget()
            self._seen = now

    def _soon(self, one: _Running, there: int) -> bool:
        """Whether a running request is about to read a page or more of what this one begins with, beside what is ``there``: it waits for that,
        and shares it, in the place of computing the same beside it."""
        size = self.cache.page_size
        reading = [other for other in self._queues.running.values() if other.unread > 1 and other.weights == self._weights]
        return any(common_prefix(other.tokens, one.tokens[:-1]) // size * size >= there + size for other in reading)

    def _shares(self, alone: int | None) -> dict[_Running, int]:
        """How many tokens of each running request, or of one ``alone``, the next call reads: of those that grow one, of prompts in order what the
        budget leaves."""
        running = [self._queues.running[id] for id in self.running if alone in (None, id)]
        left = max(1, self._budget - sum(one.unread == 1 for one in running))  # at least one, so that no prompt waits for all others to end
        wanted: dict[_Running, int] = {}
        for one in running:
            wanted[one] = 1 if one.unread == 1 else min(one.unread, left)
            left -= wanted[one] if one.unread > 1 else 0
        return self._with_pages(wanted)

    def _with_pages(self, wanted: dict[_Running, int]) -> dict[_Running, int]:
        """What of that the pages allow. The oldest comes first, and takes pages from the youngest where none are left."""
        counts: dict[_Running, int] = {}
        free = self._slots.free_pages()
        for one, share in wanted.items():
            # A prompt takes what there is, unless it is the oldest: two that are read side by side could hold all pages and wait for each other.
            while one.slot >= 0 and self._room(one, free) < share and (one.unread == 1 or not counts):
                self._preempt(max(self._queues.running.values(), key=lambda other: other.id))
                free = self._slots.free_pages() - sum(map(self._grown, counts, counts.values()))
            if one.slot >= 0 and (count := min(share, self._room(one, free))) > 0:  # else it has given up its pages, or waits for some
                counts[one] = count
                free -= self._grown(one, count)
        return counts

    def _room(self, one: _Running, free: int) -> int:
        """The tokens that a request can read, with so many ``free`` pages."""
        return (free + self._slots.pages_of(one.read)) * self.cache.page_size - one.read

    def _grown(self, one: _Running, count: int) -> int:
        """The pages that ``count`` further tokens take."""
        return self._slots.pages_of(one.read + count) - self._slots.pages_of(one.read)

    def _preempt(self, one: _Running) -> None:
        self.cache.truncate(one.slot)
        self._end(one)
        one.slot, one.read = -1, 0
        self._queues.waiting[one.id] = one
        self.counts.preempted += 1

    def _end(self, one: _Running) -> None:
        """Let a request go. What the cache has of it stays, for one that begins alike, unless it is of weights that have changed since."""
        del self._queues.running[one.id]
        if one.weights != self._weights:
            self.cache.truncate(one.slot)
        self._slots.rest(one.slot, one.tokens[: self.cache.lengths[one.slot]])

    def _per_slot(self, counts: dict[_Running, int]) -> list[int]:
        per_slot = [0] * self._sequences
        for one, count in counts.items():
            per_slot[one.slot] = count
        return per_slot

    def _logits(self, counts: dict[_Running, int]) -> Tensor:
        in_order = sorted(counts, key=lambda one: one.slot)
        tokens = torch.tensor([token for one in in_order for token in one.tokens[one.read : one.read + counts[one]]], device="cpu")
        seq_lens = torch.tensor(self._per_slot(counts), dtype=torch.int32, device="cpu")
        with torch.inference_mode():
            logits = self._model.next_logits(tokens.to(self.cache.device), seq_lens, self.cache)
            self.cache.advance(seq_lens)
        self.counts.calls += 1
        self.counts.computed += len(tokens)
        return logits

    def _advance(self, counts: dict[_Running, int], logits: Tensor) -> list[Event]:
        for one, count in counts.items():
            one.read += count
        ready = [one for one in counts if not one.unread]
        if not ready:
            return []
        with torch.inference_mode():
            rows = logits[[one.slot for one in ready]].float()
            sound = rows.amax(-1).isfinite().tolist()  # a NaN anywhere is the largest
            good = [one for one, right in zip(ready, sound, strict=True) if right]
            rows = rows[torch.tensor(sound, device=rows.device)]
            chosen = choose_tokens(rows, [one.sampler for one in good]) if good else []
            # One that the model does not have would fail the next step, which is that of all.
            tokens = [None if token is None or token >= self._model.vocabulary else token for token in chosen]
            logprobs = _logprobs(rows, tokens, [one.request.logprobs for one in good])
        failed = [one for one, right in zip(ready, sound, strict=True) if not right]
        failed += [one for one, token in zip(good, tokens, strict=True) if token is None]
        for one in failed:
            self._end(one)
        told = [self._tell(one, token, about) for one, token, about in zip(good, tokens, logprobs, strict=True) if token is not None]
        return [Event(one.id, ended="failed") for one in failed] + told

    def _tell(self, one: _Running, token: int, logprobs: Logprobs | None) -> Event:
        one.tokens.append(token)
        one.sampler.add(token)
        self.counts.chosen += 1
        ended: Ended | None = "stop" if token in one.request.stop_tokens else "length" if one.made == one.request.max_tokens else None
        if ended:
            self._end(one)
        return Event(one.id, token, logprobs, ended)


def _logprobs(rows: Tensor, chosen: list[int | None], wanted: list[int | None]) -> list[Logprobs | None]:
    """Of the rows that have a token and ask for them, from logits ``[sequences, vocabulary]``."""
    told: list[Logprobs | None] = [None] * len(chosen)
    for row, (token, count) in enumerate(zip(chosen, wanted, strict=True)):
        if token is not None and count is not None:
            values = rows[row].log_softmax(-1)
            best = values.topk(min(count, len(values)))
            told[row] = Logprobs(float(values[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
    return told
