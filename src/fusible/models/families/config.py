"""A checkpoint's ``config.json``, whose entries are asked for by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from fusible.errors import CheckpointError, expected

__all__ = ["Config"]

T = TypeVar("T")

_OTHER_HEAD = re.compile(r"For(?!CausalLM$)[A-Z]\w*$|(?<!LMHead)Model$")
"""In the name of a class, as transformers forms them."""


class Config:
    """Entries of a configuration. What is missing, and what is of a kind that a model cannot be made of, raises ``CheckpointError``."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.entries = entries

    def with_defaults(self, **values: Any) -> Config:
        """The same with ``values`` for entries that are not there: files leave out what is a family's default. What is null stays so."""
        return Config({**values, **self.entries})

    def with_names(self, **names: str) -> Config:
        """The same with what stands under a further name of an entry. Raises ``CheckpointError`` where it stands under both, and is not the same."""
        named = {name: self.entries[further] for further, name in names.items() if self.has(further)}
        for further, name in names.items():
            if self.has(further) and self.has(name) and self.entries[name] != self.entries[further]:
                raise self.refuse(further, f"{self.entries[name]!r}, as {name} says")
        return Config({**self.entries, **named})

    @property
    def model_type(self) -> str:
        return self.text("model_type")

    def has(self, name: str) -> bool:
        """Whether there is an entry other than null."""
        return self.entries.get(name) is not None

    def size(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least ``least``."""
        value = self._entry(name, default)
        if type(value) is not int or value < least:
            raise CheckpointError(expected(f"an integer of at least {least}", of=self._of(name), got=repr(value), do="give the model's"))
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._entry(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(expected("a number", of=self._of(name), got=repr(value), do="give the model's"))
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._entry(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(expected("true or false", of=self._of(name), got=repr(value), do="give one of the two"))
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._entry(name, default)
        if not isinstance(value, str):
            raise CheckpointError(expected("a text", of=self._of(name), got=repr(value), do="give the model's"))
        return value

    def names(self, name: str) -> list[str] | None:
        """A list of texts, or None where there is none."""
        value = self.entries.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise CheckpointError(expected("a list of texts", of=self._of(name), got=repr(value), do="give one of each layer"))
        return value

    def pair(self, name: str, default: int) -> tuple[int, int]:
        """An integer of at least 1 for both, or a list of two."""
        value = self._entry(name, default)
        if isinstance(value, list | tuple) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
            return value[0], value[1]
        if isinstance(value, list | tuple):
            raise CheckpointError(expected("an integer of at least 1, or two", of=self._of(name), got=repr(value), do="give the model's"))
        size = self.size(name, default)
        return size, size

    def choice(self, name: str, of: Mapping[str, T], default: str) -> T:
        """What a text is the name of."""
        value = self.text(name, default)
        if value not in of:
            raise self.refuse(name, f"one of {', '.join(of)}")
        return of[value]

    def architecture(self, first: str, *others: str) -> str:
        """The class of transformers' that the model was saved as, one of these; ``first``, if there are no others, where the file names none."""
        names = self.names("architectures") or ([] if others else [first])
        if not names or names[0] not in (first, *others):
            do = "load it by transformers, and convert it by fusible.convert"
            wanted = f"one of {', '.join((first, *others))}" if others else first
            raise CheckpointError(expected(wanted, of=self._of("architectures"), got=names[0] if names else "none", do=do))
        return names[0]

    def check_language_model(self) -> None:
        """Raise ``CheckpointError`` where the model was saved as one with another head, or with none: its decoder has the weights of a language
        model, and their head's too where that is the table of embeddings."""
        names = self.names("architectures") or []
        if names and _OTHER_HEAD.search(names[0]):
            do = "load it by transformers, and convert it by fusible.convert"
            raise CheckpointError(expected("a language model, ...ForCausalLM", of=self._of("architectures"), got=names[0], do=do))

    def tokens(self, name: str) -> tuple[int, ...]:
        """One token, a list of some, or none."""
        value = self.entries.get(name)
        tokens = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in tokens):
            raise CheckpointError(expected("a token, or several", of=self._of(name), got=repr(value), do="give the model's"))
        return tuple(tokens)

    @property
    def labels(self) -> int:
        """How many classes a classifier tells apart."""
        named = self.part("id2label")
        return len(named.entries) if named is not None and named.entries else self.size("num_labels", 2)

    def part(self, name: str) -> Config | None:
        """The entries under a name, or None where there are none."""
        value = self.entries.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise CheckpointError(expected("entries by name", of=self._of(name), got=repr(value), do="give the model's"))
        return None if value is None else Config(value)

    def refuse(self, name: str, supported: str, got: Any = None) -> CheckpointError:
        """The error of an entry whose value this family's models are not made with. ``got``: that value, where it does not stand under the name."""
        value = self.entries.get(name) if got is None else got
        return CheckpointError(expected(supported, of=self._of(name), got=repr(value), do="convert the model by fusible.convert"))

    def require(self, **values: Any) -> None:
        """Raise where an entry is there and is another than the one given, which is the only one that models are made with."""
        for name, value in values.items():
            if name in self.entries and self.entries[name] != value:
                raise self.refuse(name, repr(value))

    def _entry(self, name: str, default: Any) -> Any:
        value = self.entries.get(name)
        if value is None and default is None:
            raise CheckpointError(expected("an entry", of=self._of(name), got="none", do="give the model's"))
        return default if value is None else value

    def _of(self, name: str) -> str:
        kind = self.entries.get("model_type")
        return f"{name} of config.json" + (f" of a {kind} model" if isinstance(kind, str) else "")
