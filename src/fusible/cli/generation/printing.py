"""Prints sequences of bytes as text while they grow."""

from __future__ import annotations

import codecs
from typing import TextIO

__all__ = ["TextStream"]


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
