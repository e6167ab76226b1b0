"""The options of a training run, as a value that refuses illegal combinations. Imports no torch: the command line's help reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from fusible.errors import ArgumentError, CheckpointError, expected

__all__ = ["BYTES", "EXECUTORS", "MAX_STEPS", "RECIPES", "TrainOptions"]

RECIPES = ("bf16", "fp32", "delayed", "current", "mxfp8", "block", "nvfp4")
EXECUTORS = ("eager", "xla")
BYTES = 256
"""The values of a byte: what is embedded, and what the model chooses among."""

MAX_STEPS = 2**21
"""A checkpoint holds the loss of each step, and is read up to 64 MiB of them."""

_BLOCKS = {"mxfp8": 32, "nvfp4": 16}
"""What rows and columns of everything that a recipe quantizes are multiples of."""


@dataclass(frozen=True)
class TrainOptions:
    """What is trained. Runs of equal options (``steps`` apart) on one machine are bit-identical as far as both go.

    ``recipes`` are names in ``RECIPES``; ``text`` is a path, or None for the interpreter's documentation topics.
    """

    recipes: tuple[str, ...] = ("bf16",)
    executor: str = "eager"
    steps: int = 300
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    seq_len: int = 128
    batch: int = 16
    lr: float = 2e-3
    decay_steps: int = 300
    seed: int = 0
    text: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name))
        for name in ("steps", "layers", "heads", "seq_len", "batch", "decay_steps"):
            if getattr(self, name) < 1:
                raise ArgumentError(expected("at least 1", of=_flag(name), got=getattr(self, name), do="give a larger number"))
        if self.steps > MAX_STEPS:
            raise ArgumentError(expected(f"at most {MAX_STEPS}", of="--steps", got=self.steps, do="give fewer, and go on in another folder"))
        if not 0 < self.lr < float("inf"):
            raise ArgumentError(expected("a positive number", of="--lr", got=self.lr, do="give e.g. 2e-3"))
        if not 0 <= self.seed < 2**62:
            raise ArgumentError(expected("a number from 0 to 2**62 - 1", of="--seed", got=self.seed, do="give another seed"))
        if self.hidden < 1 or self.hidden % (2 * self.heads):
            raise ArgumentError(
                expected(
                    f"a multiple of twice the {self.heads} heads (rotary embeddings pair columns)",
                    of="--hidden",
                    got=self.hidden,
                    do="change one of them",
                )
            )
        self._check_names()
        for recipe in self.recipes:
            for of, size in (("--hidden", self.hidden), ("--batch times --seq-len", self.batch * self.seq_len)):
                if size % _BLOCKS.get(recipe, 1):
                    wanted = f"a multiple of {_BLOCKS[recipe]}, the block of {recipe},"
                    raise ArgumentError(expected(wanted, of=of, got=size, do="give another size, or leave that recipe out"))

    def _check_names(self) -> None:
        unknown = [name for name in self.recipes if name not in RECIPES]
        if unknown or not self.recipes:
            got = repr(unknown[0]) if unknown else "none"
            raise ArgumentError(
                expected(f"{', '.join(RECIPES[:-1])} or {RECIPES[-1]}, comma-separated,", of="--recipe", got=got, do="name one of these")
            )
        if len(set(self.recipes)) != len(self.recipes):
            raise ArgumentError(expected("different recipes", of="--recipe", got=",".join(self.recipes), do="name each once"))
        if self.executor not in EXECUTORS:
            raise ArgumentError(expected(" or ".join(EXECUTORS), of="--executor", got=repr(self.executor), do="name one of these"))

    @classmethod
    def from_command_line(cls, given: Mapping[str, Any]) -> Self:
        """The defaults with what was ``given`` on the command line (``recipe`` as one comma-separated string)."""
        return cls(**_read(given))

    def continued(self, given: Mapping[str, Any]) -> Self:
        """These options, resumed: ``given`` may name another number of steps or another place of the text, and repeat the rest."""
        changes = _read(given)
        for name, value in changes.items():
            if name not in ("steps", "text") and value != getattr(self, name):
                had = ",".join(self.recipes) if name == "recipes" else getattr(self, name)
                raise ArgumentError(
                    expected(f"{had}, as the resumed run has it,", of=_flag(name), got=given.get(name, given.get("recipe")), do="leave it out")
                )
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """As an object of JSON."""
        return {**asdict(self), "recipes": list(self.recipes)}

    @classmethod
    def from_json(cls, saved: Any) -> Self:
        """What ``to_json`` gave. Raises ``CheckpointError`` for anything else."""
        names = {field.name for field in fields(cls)}
        if not isinstance(saved, dict) or set(saved) != names or not isinstance(saved["recipes"], list):
            raise CheckpointError(
                expected(f"the options {', '.join(sorted(names))}", of="a checkpoint", got="others", do="use the version that saved it")
            )
        try:
            return cls(**{**saved, "recipes": tuple(saved["recipes"])})
        except ArgumentError as error:
            raise CheckpointError(f"Expected legal options of a checkpoint, got others ({error}): use an intact checkpoint.") from None


def _flag(name: str) -> str:
    return "--recipe" if name == "recipes" else f"--{name.replace('_', '-')}"


def _read(given: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(TrainOptions)}
    values = {name: value for name, value in given.items() if name in names}
    if "recipe" in given:
        values["recipes"] = tuple(name.strip() for name in given["recipe"].split(",") if name.strip())
    if "text" in values:
        values["text"] = str(Path(values["text"]).absolute())
    return values


def _check_type(name: str, value: Any) -> None:
    kinds: dict[str, tuple[type, ...]] = {"recipes": (tuple,), "executor": (str,), "lr": (float, int), "text": (str, type(None))}
    allowed = kinds.get(name, (int,))
    if not isinstance(value, allowed) or isinstance(value, bool):
        raise ArgumentError(expected(f"a value of type {allowed[0].__name__}", of=_flag(name), got=repr(value), do="give one"))
