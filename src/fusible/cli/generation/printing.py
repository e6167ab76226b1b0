"""Prints sequences as text while they grow."""

from __future__ import annotations

import codecs
from typing import TextIO

__all__ = ["TextColumns", "TextStream"]


class TextStream:
    """Writes sequences of UTF-8 bytes that grow together to ``out``, one after another.

    The first is written while it grows, the others at the end. Invalid UTF-8 becomes U+FFFD.
    """

    def __init__(self, out: TextIO, prompts: list[bytes]) -> None:
        self._out = out
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in prompts]
        self._waiting = [decoder.decode(prompt) for decoder, prompt in zip(self._decoders, prompts, strict=True)]
        self._numbered = len(prompts) > 1
        self._begin(0)

    def add(self, tokens: list[int]) -> None:
        """One more byte of each sequence."""
        for i, (decoder, token) in enumerate(zip(self._decoders, tokens, strict=True)):
            self._waiting[i] += decoder.decode(bytes([token]))
        self._write(0)

    def finish(self) -> None:
        """Write the rest of the first sequence, and then the others."""
        for i, decoder in enumerate(self._decoders):
            self._waiting[i] += decoder.decode(b"", final=True)
            if i:
                self._begin(i)
            self._write(i)
            self._out.write("\n")
        self._out.flush()

    def _begin(self, index: int) -> None:
        if self._numbered:
            self._out.write(f"[{index + 1}]\n")

    def _write(self, index: int) -> None:
        self._out.write(self._waiting[index])
        self._waiting[index] = ""
        self._out.flush()


class TextColumns:
    """Writes texts that grow together to ``out``, one after another: the first that has not ended while it grows, those behind it in their turn.

    ``heads``: what each begins with.
    """

    def __init__(self, out: TextIO, heads: list[str]) -> None:
        self._out, self._waiting = out, list(heads)
        self._ended = [False] * len(heads)
        self._current = 0
        self._begin()

    def add(self, index: int, text: str, ended: bool = False) -> None:
        """Further text of one of them."""
        self._waiting[index] += text
        self._ended[index] |= ended
        while self._current < len(self._waiting) and (self._current == index or self._ended[self._current]):
            self._write()
            if not self._ended[self._current]:
                break
            self._next()

    def finish(self) -> None:
        """Write what has not been written, of texts that were interrupted too."""
        while self._current < len(self._waiting):
            self._write()
            self._next()

    def _write(self) -> None:
        self._out.write(self._waiting[self._current])
        self._waiting[self._current] = ""
        self._out.flush()

    def _next(self) -> None:
        self._out.write("\n")
        self._out.flush()
        self._current += 1
        self._begin()

    def _begin(self) -> None:
        if 1 < len(self._waiting) > self._current:
            self._out.write(f"[{self._current + 1}]\n")
