"""The base of the operations of both IRs: an operation's fields are its attributes, and are printed with it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, fields
from functools import cache
from typing import ClassVar, dataclass_transform

from fusible.errors import ArgumentError, expected

__all__ = ["Operation", "attribute_names"]


@dataclass_transform(eq_default=False, field_specifiers=(field,))
class Operation:
    """The base of the operations of an IR. A subclass is a dataclass, without a decorator: its fields are the attributes of the operation.

    An operation is equal to itself alone. A class with an ``__init__`` of its own raises ``ArgumentError``: what that sets is no field, and
    operations that differ in it would be taken for one another.
    """

    HIDDEN: ClassVar[frozenset[str]] = frozenset()
    """Fields that are no attributes: they are neither printed nor part of a compiled program's key."""

    OWN_INIT: ClassVar[bool] = False
    """Whether the class has an ``__init__``, whose other arguments make no difference to a program."""

    def __init_subclass__(cls) -> None:
        if "__init__" in cls.__dict__ and not cls.OWN_INIT:
            of, do = f"the attributes of the operation {cls.__name__}", "annotate them in the class, as in `k: int`, and leave __init__ out"
            raise ArgumentError(expected("fields", of=of, got="an __init__", do=do))
        if inspect.get_annotations(cls):  # a class without fields of its own has those of its base
            dataclass(eq=False)(cls)

    def attributes(self) -> list[str]:
        """``name=value`` for every attribute, in order."""
        return [f"{name}={getattr(self, name)}" for name in attribute_names(type(self))]


@cache
def attribute_names(kind: type[Operation]) -> tuple[str, ...]:
    """The names of an operation's attributes, in order."""
    return tuple(f.name for f in fields(kind) if f.name not in kind.HIDDEN)  # type: ignore[arg-type] - every subclass is a dataclass
