"""Reads the fields of a request's body, each once and with its domain; what is left is refused."""

from __future__ import annotations

import json
import math
from typing import Any

from fusible.cli.serving.errors import invalid

__all__ = ["Body"]

_SHOWN = 80


class Body:
    """The object of a request. Each method takes the field ``name`` out; null is as good as no field. Raises ``ApiError`` for wrong values."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = {name: value for name, value in fields.items() if value is not None}

    def any(self, name: str) -> Any:
        """The field as it is, or None."""
        return self._fields.pop(name, None)

    def text(self, name: str, default: str | None = None) -> str | None:
        """A text."""
        return self._of(name, str, "a text", default)

    def switch(self, name: str, default: bool = False) -> bool:
        """True or false."""
        return self._of(name, bool, "true or false", default)

    def object(self, name: str) -> dict[str, Any]:
        """An object; an empty one where there is none."""
        return self._of(name, dict, "an object", {})

    def integer(self, name: str, default: int | None = None, *, least: int, most: int | None = None) -> int | None:
        """An integer from ``least`` to ``most``."""
        value = self.any(name)
        if value is None:
            return default
        domain = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
        if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
            raise invalid(domain, of=name, got=_short(value), do="give such a number")
        return value

    def number(self, name: str, default: float, *, least: float, most: float = math.inf) -> float:
        """A number from ``least`` to ``most``."""
        value = self.any(name)
        if value is None:
            return default
        domain = f"a number of at least {least:g}" if most == math.inf else f"a number from {least:g} to {most:g}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise invalid(domain, of=name, got=_short(value), do="give such a number")
        return float(value)

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A text, or a list of ``most`` texts at most; none of them is empty."""
        value = self.any(name)
        values = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or len(values) > most or not all(isinstance(one, str) and one for one in values):
            raise invalid(f"a text or at most {most} of them, none empty", of=name, got=_short(value), do="give such texts")
        return tuple(values)

    def same(self, name: str, *allowed: Any) -> None:
        """A field that this server does not serve: it may have a value that asks for nothing."""
        value = self.any(name)
        if value is not None and not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            wanted = " or ".join(map(_short, allowed)) if allowed else "nothing"
            raise invalid(f"{wanted}, as this server serves no other", of=name, got=_short(value), do="leave it out")

    def ignore(self, *names: str) -> None:
        """Fields that change no answer."""
        for name in names:
            self._fields.pop(name, None)

    def finish(self) -> None:
        """Refuse fields that nobody has taken: a parameter that is silently left out is worse than none."""
        if self._fields:
            name = next(iter(self._fields))[:80]
            raise invalid("a parameter that this server knows", of=name or "a parameter", got="another", do="leave it out")

    def _of(self, name: str, kind: type, domain: str, default: Any) -> Any:
        value = self.any(name)
        if value is None:
            return default
        if not isinstance(value, kind):
            raise invalid(domain, of=name, got=_short(value), do="give one")
        return value


def _short(value: Any) -> str:
    """A value as a sentence has it."""
    if isinstance(value, list | dict):
        kind, text = ("a list of {}" if isinstance(value, list) else "an object of {} entries").format(len(value)), json.dumps(value)
        return text if len(text) <= _SHOWN else kind
    return str(value).lower() if isinstance(value, bool) else repr(value)[:_SHOWN]
