"""Text that grows token by token: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusible.errors import ArgumentError, expected
from fusible.models.prefix import common_prefix
from fusible.models.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopStrings", "TextStream"]

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_INCOMPLETE = 3
"""Bytes of a UTF-8 character without its last; each may be a token."""

_LONG, _KEPT = 48, 16
"""Tokens that are decoded together at most, where they can be parted, and how many are kept then."""


class Detokenizer:
    """The text of tokens, as far as later ones cannot change it: put together, what ``push`` and ``finish`` return is the text of all tokens.

    ``before``: tokens that stand before the first, whose text is not returned. What a token looks like can hang on them: many tokenizers drop
    the space in front of the first word of a text. Bytes that are no UTF-8 become U+FFFD; tokenizers that have tokens of single bytes replace a
    whole run of such tokens where one byte of it is wrong, and what was returned of that run by then stays as it was.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(before[-_LONG:])
        self._shown = tokenizer.decode(self._tokens)
        self._incomplete = 0

    def push(self, token: int) -> str:
        """Count in a token, and return the text that is certain by now."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        complete = text.rstrip(_UNKNOWN)
        if len(complete) == len(text):
            self._incomplete = 0
            return self._show(text, len(text))
        # The bytes of one character may be spread over several tokens. Those of more than fit into a character never make one.
        self._incomplete += 1
        return self._show(text, len(complete) if self._incomplete <= _INCOMPLETE else max(len(complete), len(text) - _INCOMPLETE))

    def finish(self) -> str:
        """The rest, where bytes of a character are missing."""
        text = self._tokenizer.decode(self._tokens)
        return self._show(text, len(text))

    def _show(self, text: str, end: int) -> str:
        """The text up to ``end`` behind what was shown, as far as that still holds: a byte can complete a character of ``before``."""
        visible = text[:end]
        new = visible[common_prefix(self._shown, visible) :]
        if new:
            self._shown = visible
        if len(self._tokens) >= _LONG and not self._incomplete:
            self._forget(text)
        return new

    def _forget(self, text: str) -> None:
        """Keep the last tokens alone, if these have the same text without those before, and are not cut within a character."""
        kept = self._tokens[-_KEPT:]
        end = self._tokenizer.decode(kept)
        if end and _UNKNOWN not in end and text.endswith(end):
            self._tokens, self._shown = kept, end


class StopStrings:
    """Text up to the first of some strings. ``stopped`` says whether one has come."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = tuple(strings)
        if "" in self._strings:
            raise ArgumentError(expected("texts of at least one character", of="stop", got="an empty one", do="leave it out"))
        self._withheld, self.stopped = "", False

    def push(self, text: str) -> str:
        """What of the text so far belongs to no stop string, nor to what may become one."""
        if self.stopped or not self._strings:
            return "" if self.stopped else text
        text = self._withheld + text
        # The one that is complete first stops: that does not hang on how the text is cut into tokens.
        found = [(at + len(string), at) for string in self._strings if (at := text.find(string)) >= 0]
        if found:
            self._withheld, self.stopped = "", True
            return text[: min(found)[1]]
        begun = max(self._begun(text, string) for string in self._strings)
        self._withheld = text[len(text) - begun :]
        return text[: len(text) - begun]

    def finish(self) -> str:
        """What was held back of a stop string that did not come."""
        rest, self._withheld = self._withheld, ""
        return rest

    @staticmethod
    def _begun(text: str, string: str) -> int:
        """The longest end of ``text`` that ``string`` begins with."""
        return next((length for length in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:length])), 0)


class TextStream:
    """The text of a sequence that grows: whole characters, up to the first of the ``stop`` strings. After ``stopped`` nothing follows."""

    def __init__(self, tokenizer: Tokenizer, stop: Iterable[str] = (), before: Sequence[int] = ()) -> None:
        self._tokens, self._stop = Detokenizer(tokenizer, before), StopStrings(stop)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stop.stopped

    def push(self, token: int) -> str:
        """Count in a token, and return the text that is certain by now."""
        return self._stop.push(self._tokens.push(token))

    def finish(self) -> str:
        """The rest of the text."""
        return "" if self.stopped else self._stop.push(self._tokens.finish()) + self._stop.finish()
