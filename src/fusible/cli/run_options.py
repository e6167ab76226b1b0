"""The options of a run as a value: checked, kept in its checkpoint, and carried on by a command that resumes it. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self

from fusible.errors import ArgumentError, CheckpointError, expected

__all__ = ["MAX_STEPS", "RunOptions"]

MAX_STEPS = 2**21
"""A checkpoint holds the loss of each step, and is read up to 64 MiB of them."""


@dataclass(frozen=True)
class RunOptions(ABC):
    """Base of the options of a kind of run, which are fields.

    ``LISTS``: those that are tuples. ``TYPES``: of the others that are no integers. ``CHANGED``: what a resumed command may say anew; other options
    it may only repeat. ``SINCE``: options that the first checkpoints lack, with the values that those runs used. ``FLAGS``: those whose flag is
    another name.
    """

    LISTS: ClassVar[tuple[str, ...]]
    TYPES: ClassVar[Mapping[str, tuple[type, ...]]]
    CHANGED: ClassVar[tuple[str, ...]]
    SINCE: ClassVar[Mapping[str, Any]] = {}
    FLAGS: ClassVar[Mapping[str, str]] = {}

    @classmethod
    @abstractmethod
    def read(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The options among the command line's ``arguments``, as fields."""

    @classmethod
    def flag(cls, name: str) -> str:
        """What a field is called on the command line."""
        return f"--{cls.FLAGS.get(name, name).replace('_', '-')}"

    def continued(self, arguments: Mapping[str, Any]) -> Self:
        """These options for a run that is resumed with ``arguments``. Raises ``ArgumentError`` for others than may change."""
        changes = self.read(arguments)
        for name, value in changes.items():
            own = getattr(self, name)
            if name not in self.CHANGED and value != own:
                shown = ",".join(own) if isinstance(own, tuple) else own
                wanted = f"{'none' if shown in ('', None) else shown}, as the resumed run has it"
                got = arguments.get(self.FLAGS.get(name, name))
                raise ArgumentError(expected(wanted, of=self.flag(name), got=got, do="leave it out"))
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """As an object of JSON."""
        return {**asdict(self), **{name: list(getattr(self, name)) for name in self.LISTS}}

    @classmethod
    def from_json(cls, saved: Any) -> Self:
        """The options of which ``to_json`` gave ``saved``. Raises ``CheckpointError`` for anything else."""
        names = {field.name for field in fields(cls)}
        if isinstance(saved, dict):
            saved = {**cls.SINCE, **saved}
        if not isinstance(saved, dict) or set(saved) != names or not all(isinstance(saved[name], list) for name in cls.LISTS):
            wanted = f"the options {', '.join(sorted(names))}"
            raise CheckpointError(expected(wanted, of="a checkpoint", got="others", do="use the version that saved it"))
        try:
            return cls(**{**saved, **{name: tuple(saved[name]) for name in cls.LISTS}})
        except ArgumentError as error:
            raise CheckpointError(expected("legal options", of="a checkpoint", got=f"others ({error})", do="use an intact checkpoint")) from None

    def check_types(self) -> None:
        """Raise ``ArgumentError`` for a value of another type than its option has."""
        for field in fields(self):
            value, allowed = getattr(self, field.name), (tuple,) if field.name in self.LISTS else self.TYPES.get(field.name, (int,))
            if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
                raise ArgumentError(expected(f"a value of type {allowed[0].__name__}", of=self.flag(field.name), got=repr(value), do="give one"))

    def check_least(self, least: int, *names: str) -> None:
        """Raise ``ArgumentError`` where one of the options ``names`` is smaller. None is not."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < least:
                raise ArgumentError(expected(f"at least {least}", of=self.flag(name), got=value, do="give a larger number"))

    @staticmethod
    def check_range(steps: int, lr: float, seed: int) -> None:
        """Raise ``ArgumentError`` for what no run can have."""
        if steps > MAX_STEPS:
            raise ArgumentError(expected(f"at most {MAX_STEPS}", of="--steps", got=steps, do="give fewer, and go on in another folder"))
        if not 0 < lr < float("inf"):
            raise ArgumentError(expected("a positive number", of="--lr", got=lr, do="give e.g. 1e-3"))
        if not 0 <= seed < 2**62:
            raise ArgumentError(expected("a number from 0 to 2**62 - 1", of="--seed", got=seed, do="give another seed"))
