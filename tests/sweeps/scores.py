"""Whether an error is clear, and how many bad calls came to what."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from wrong_values import words

from fusible.errors import FusibleError, NotServedError

__all__ = ["Scores", "score"]

SENTENCE = re.compile(r"\S.*: expected \S.*, got .*; \S.*\.")


def score(error: BaseException, names: Iterable[str], *, changed: bool = False, lines: bool = False) -> str:
    """Whether it is "clear", or why not: an error that is Fusible's own, of one sentence (subject, what was expected, what came, what to do) that has
    one of ``names``, and was raised before anything was ``changed``. With ``lines`` the user's line stands around it."""
    text, wrong = str(error), []
    if lines and isinstance(error, FusibleError) and error.located:
        text = next((line.strip() for line in text.splitlines() if ": expected " in line), text)
    if changed:
        wrong.append("changed")
    if not isinstance(error, FusibleError):
        wrong.append(f"a {type(error).__name__}")
    elif "\n" in text:
        wrong.append("several lines")
    elif words(text).isdisjoint(names):
        wrong.append("no name")
    elif not SENTENCE.fullmatch(text) and not isinstance(error, NotServedError):  # which has the reason of each backend
        wrong.append("no such sentence")
    return ", ".join(wrong) or "clear"


class Scores:
    """The outcomes of bad calls by kind; ``unclear``: those that are not as they should be."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.unclear: list[str] = []

    def add(self, call: object, kind: str, error: BaseException | None = None) -> None:
        self.counts[kind] += 1
        if kind not in ("clear", "accepted", "right afterwards"):
            self.unclear.append(f"{call}: {kind}: {type(error).__name__ if error else ''}: {str(error)[:250]}")
