"""What is asked of an engine, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fusible.errors import ArgumentError, check_integer, expected
from fusible.models.generation.sampling import Sampling, each_sampling
from fusible.models.generation.token_rows import tokens_in

__all__ = ["Ended", "Event", "Logprobs", "Request"]

Ended = Literal["stop", "length", "cancelled", "failed"]
"""Why a request ended: its model chose a stop token, it has its tokens, someone cancelled it, or its logits were no numbers, or gave no token."""


@dataclass(frozen=True)
class Request:
    """A prompt to go on from, by ``max_tokens`` tokens at most. One of ``stop_tokens`` is the last.

    ``logprobs``: of each token the log-probability, and that of so many of the likeliest; None for none.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ArgumentError(expected("at least one token", of="prompt", got="none", do="give a text to go on from"))
        tokens_in(self.prompt, "prompt")
        check_integer(self.max_tokens, "max_tokens", least=1)
        if self.logprobs is not None:
            check_integer(self.logprobs, "logprobs", least=0)
        each_sampling([self.sampling], 1)


@dataclass(frozen=True)
class Logprobs:
    """The natural logarithm of the probability that the model gave the chosen token, before any sampling, and of the ``likeliest`` tokens."""

    chosen: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Event:
    """A further token of the request ``id``, or its end, or both: the last token comes with why it is the last."""

    id: int
    token: int | None = None
    logprobs: Logprobs | None = None
    ended: Ended | None = None
