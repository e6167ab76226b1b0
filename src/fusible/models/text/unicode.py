"""``check_unicode``: whether UTF-8 has bytes for a text."""

from __future__ import annotations

from fusible.errors import ArgumentError, expected

__all__ = ["check_unicode"]


def check_unicode(text: str, of: str = "the text") -> None:
    """Raise ``ArgumentError`` for halves of surrogate pairs, which JSON can name."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ArgumentError(expected("characters of Unicode", of=of, got="half of a surrogate pair", do="give whole ones")) from None
