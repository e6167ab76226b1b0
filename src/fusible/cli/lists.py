"""Options that are several names, comma-separated."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fusible.errors import ArgumentError, expected

__all__ = ["any_of", "check_names", "names_in"]


def names_in(text: str, option: str) -> tuple[str, ...]:
    """The names in the value of an option. Raises ``ArgumentError`` where one is empty: a comma too many is a name that was forgotten."""
    names = tuple(name.strip() for name in text.split(","))
    if "" in names:
        raise ArgumentError(expected("names, comma-separated", of=option, got=repr(text[:100]), do="put a name on both sides of each comma"))
    return names


def any_of(known: Collection[str]) -> str:
    """``"a, b or c, comma-separated"``."""
    *names, last = known
    return f"{', '.join(names)} or {last}, comma-separated"


def check_names(names: Sequence[str], known: Collection[str], option: str) -> None:
    """Raise ``ArgumentError`` where an option gives no name, or one that is not ``known``."""
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ArgumentError(expected(any_of(known), of=option, got=repr(unknown[0]) if unknown else "none", do="name one of these"))
