"""The base of the operations of both IRs: an operation's fields are its attributes, and are printed with it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields
from functools import cache
from typing import ClassVar, dataclass_transform

__all__ = ["Operation", "attribute_names"]


@dataclass_transform(eq_default=False, field_specifiers=(field,))
class Operation:
    """The base of the operations of an IR. A subclass is a dataclass, without a decorator: its fields are the attributes of the operation.

    An operation is equal to itself alone.
    """

    HIDDEN: ClassVar[frozenset[str]] = frozenset()
    """Fields that are no attributes: they are neither printed nor part of a compiled program's key."""

    def __init_subclass__(cls) -> None:
        if inspect.get_annotations(cls):  # a class without fields of its own has those of its base
            dataclass(eq=False)(cls)

    def attributes(self) -> list[str]:
        """``name=value`` for every attribute, in order."""
        return [f"{name}={getattr(self, name)}" for name in attribute_names(type(self))]


@cache
def attribute_names(kind: type[Operation]) -> tuple[str, ...]:
    """The names of an operation's attributes, in order."""
    return tuple(f.name for f in fields(kind) if f.name not in kind.HIDDEN)  # type: ignore[arg-type] - every subclass is a dataclass
