"""Prompts as lists of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from torch import Tensor

from fusible.errors import DTypeError, expected

__all__ = ["tokens_in"]


def tokens_in(row: Any, of: str) -> tuple[int, ...]:
    """The tokens of one text: of a list, or of an integer tensor ``[seq]``. Raises ``DTypeError`` for anything else, as texts are."""
    if isinstance(row, str) or not isinstance(row, Iterable):
        do = "encode it by the model's tokenizer" if isinstance(row, str) else "give a list of such lists, as [[5, 6, 7]]"
        raise DTypeError(expected("a list of tokens for each text", of=of, got=repr(row)[:80], do=do))
    tokens: tuple[Any, ...] = tuple(row.tolist() if isinstance(row, Tensor) and row.dim() else row)
    wrong = [token for token in tokens if type(token) is not int and (isinstance(token, bool) or not isinstance(token, Integral))]
    if wrong:
        raise DTypeError(expected("tokens, which are integers", of=of, got=repr(wrong[0])[:80], do="encode texts by the model's tokenizer"))
    return tokens
