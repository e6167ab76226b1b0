"""The objects that OpenAI's interface answers with: completions and chats, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fusible.cli.serving.worker import Finish, Piece
from fusible.models.generation import Logprobs
from fusible.models.text import Tokenizer

__all__ = ["ChatReply", "CompletionReply", "Gathered", "Reply", "usage"]

_LEAST = -9999.0
"""JSON has no -inf."""

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@dataclass
class Gathered:
    """The text of one prompt, put together."""

    text: str = ""
    tokens: list[tuple[int, Logprobs | None]] = field(default_factory=list)
    made: int = 0
    ended: Finish | None = None

    def add(self, piece: Piece) -> None:
        """Count in a piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.made, self.ended = piece.made, piece.ended


def usage(prompts: Sequence[Sequence[int]], made: int) -> dict[str, int]:
    """How many tokens were read and made."""
    read = sum(map(len, prompts))
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


class Reply:
    """An answer of one of the two interfaces. ``logprobs``: whether tokens are told with their probabilities."""

    _prefix = _kind = _chunk = ""

    def __init__(self, model: str, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._tokenizer, self._logprobs = tokenizer, logprobs
        self._common = {"id": f"{self._prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, gathered: Sequence[Gathered], used: dict[str, int]) -> dict[str, Any]:
        """All of it."""
        choices = [self._choice(index, one.text, one.tokens, one.ended) for index, one in enumerate(gathered)]
        return {**self._common, "object": self._kind, "choices": choices, "usage": used}

    def beginning(self, index: int) -> dict[str, Any] | None:
        """What is sent before the first text of a prompt."""
        return None

    def chunk(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """A piece of a stream; None where it has nothing to tell."""
        if not piece.text and not piece.ended and not (self._logprobs and piece.tokens):
            return None
        return self._chunk_of([self._delta(index, piece)])

    def used(self, used: dict[str, int]) -> dict[str, Any]:
        """What is sent behind the last text."""
        return {**self._chunk_of([]), "usage": used}

    def _chunk_of(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._common, "object": self._chunk, "choices": choices}

    def _choice(self, index: int, text: str, tokens: Sequence[tuple[int, Logprobs | None]], ended: Finish | None) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _told(self, tokens: Sequence[tuple[int, Logprobs | None]]) -> list[tuple[str, float, list[tuple[str, float]]]]:
        """Of each token its text and logarithm, and those of the likeliest."""
        named = self._tokenizer.token_text
        return [
            (named(token), max(about.chosen, _LEAST), [(named(other), max(value, _LEAST)) for other, value in about.likeliest])
            for token, about in tokens
            if about is not None
        ]


class CompletionReply(Reply):
    """Of ``/v1/completions``."""

    _prefix, _kind, _chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, logprobs: bool) -> None:
        super().__init__(model, tokenizer, logprobs)
        self._offsets: dict[int, int] = {}

    def _choice(self, index: int, text: str, tokens: Sequence[tuple[int, Logprobs | None]], ended: Finish | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs_of(index, tokens) if self._logprobs else None, "finish_reason": ended}

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._choice(index, piece.text, piece.tokens, piece.ended)

    def _logprobs_of(self, index: int, tokens: Sequence[tuple[int, Logprobs | None]]) -> dict[str, Any]:
        told, offsets = self._told(tokens), []
        for text, _, _ in told:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        return {
            "tokens": [text for text, _, _ in told],
            "token_logprobs": [value for _, value, _ in told],
            "top_logprobs": [dict(reversed(likeliest)) for _, _, likeliest in told],  # of tokens that read alike, the likeliest
            "text_offset": offsets,
        }


class ChatReply(Reply):
    """Of ``/v1/chat/completions``."""

    _prefix, _kind, _chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def beginning(self, index: int) -> dict[str, Any]:
        """The role."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk_of([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _choice(self, index: int, text: str, tokens: Sequence[tuple[int, Logprobs | None]], ended: Finish | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs_of(tokens), "finish_reason": ended}

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return {"index": index, "delta": delta, "logprobs": self._logprobs_of(piece.tokens), "finish_reason": piece.ended}

    def _logprobs_of(self, tokens: Sequence[tuple[int, Logprobs | None]]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        told = self._told(tokens)
        return {"content": [{**_entry(text, value), "top_logprobs": [_entry(*one) for one in likeliest]} for text, value, likeliest in told]}


def _entry(text: str, value: float) -> dict[str, Any]:
    """A token; its bytes are known unless it is a part of a character."""
    return {"token": text, "logprob": value, "bytes": None if _UNKNOWN in text else list(text.encode())}
