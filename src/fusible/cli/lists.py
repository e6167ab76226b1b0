"""Options that are several names, comma-separated."""

from __future__ import annotations

from fusible.errors import ArgumentError, expected

__all__ = ["names_in"]


def names_in(text: str, option: str) -> tuple[str, ...]:
    """The names in the value of an option. Raises ``ArgumentError`` where one is empty: a comma too many is a name that was forgotten."""
    names = tuple(name.strip() for name in text.split(","))
    if "" in names:
        raise ArgumentError(expected("names, comma-separated", of=option, got=repr(text[:100]), do="put a name on both sides of each comma"))
    return names
