"""The options of ``fusible train --model``, as a value that refuses illegal combinations. Imports no torch: the command line's help reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from fusible.cli.finetuning.files import KINDS, found_files
from fusible.cli.lists import names_in
from fusible.cli.run_options import RunOptions
from fusible.cli.training.options import BLOCKS, RECIPES
from fusible.errors import ArgumentError, expected

__all__ = ["AS_IS", "BASE_FORMATS", "FinetuneOptions", "MOMENTS", "OWN"]

AS_IS = "as-is"
BASE_FORMATS = (AS_IS, "fp8", "block", "mxfp8", "nvfp4", "mxfp4")
"""What the frozen weights beneath adapters are held in: as the checkpoint has them, or in a number format."""

MOMENTS = ("fp32", "bf16", "fp16", "fp8")
"""What moments are held in; under ``fp8`` the second ones in fp16."""

_PATHS = ("model", "tokenizer", "data", "eval_data")


@dataclass(frozen=True)
class FinetuneOptions(RunOptions):
    """The options of a run. Two runs on one machine whose options differ in ``steps`` alone are bit-identical as long as both last.

    ``model``: a directory with weights, or a ``config.json`` whose model begins at random. ``tokenizer``: a directory; None: the model's. ``data``,
    ``eval_data``: files; without the second, the last ``eval_share`` of the tokens is held out. ``batch``: windows in a step, ``micro_batch`` of them
    at once (None: all). ``warmup``: steps; then a cosine down to ``min_lr`` times ``lr`` at ``decay_steps`` (None: the steps). ``clip``: the largest
    norm of gradients, 0 for any. ``moments``: what the optimizer holds them in. ``lora``: the rank of adapters, 0 for training all parameters;
    ``lora_alpha`` None for twice the rank. ``lora_targets``: the last parts of the names of layers, none for all products of blocks. ``device``: a
    name of torch's.
    """

    LISTS: ClassVar[tuple[str, ...]] = ("data", "eval_data", "lora_targets")
    TYPES: ClassVar[Mapping[str, tuple[type, ...]]] = {
        **dict.fromkeys(("model", "recipe", "moments", "base_format", "device"), (str,)),
        **dict.fromkeys(("eval_share", "lr", "min_lr", "weight_decay", "clip"), (float, int)),
        "tokenizer": (str, type(None)),
        "lora_alpha": (float, int, type(None)),
        **dict.fromkeys(("micro_batch", "decay_steps"), (int, type(None))),
        "merge": (bool,),
    }
    CHANGED: ClassVar[tuple[str, ...]] = (*_PATHS, "steps", "merge", "device")
    """Where its files are now, how far to go, what to write at the end, and where it is computed."""
    SINCE: ClassVar[Mapping[str, Any]] = {"device": "cpu", "moments": "fp32"}

    model: str
    data: tuple[str, ...]
    eval_data: tuple[str, ...] = ()
    eval_share: float = 0.05
    eval_every: int = 0
    tokenizer: str | None = None
    recipe: str = "bf16"
    steps: int = 300
    seq_len: int = 512
    batch: int = 8
    micro_batch: int | None = None
    lr: float = 1e-4
    warmup: int = 20
    decay_steps: int | None = None
    min_lr: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    moments: str = "fp32"
    seed: int = 0
    lora: int = 0
    lora_alpha: float | None = None
    lora_targets: tuple[str, ...] = ()
    base_format: str = AS_IS
    merge: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.check_types()
        if not self.data:
            raise ArgumentError(expected("files", of="--data", got="none", do=f"name files of {', '.join(KINDS)}"))
        self._check_numbers()
        self._check_windows()
        self._check_adapters()

    def _check_numbers(self) -> None:
        self.check_least(1, "steps", "seq_len", "batch", "micro_batch", "decay_steps")
        self.check_least(0, "eval_every", "warmup", "lora")
        self.check_range(self.steps, self.lr, self.seed)
        if self.lora_alpha is not None and not 0 < self.lora_alpha < math.inf:
            raise ArgumentError(expected("a positive number", of="--lora-alpha", got=self.lora_alpha, do="give e.g. twice the rank"))
        for name, most in (("weight_decay", math.inf), ("clip", math.inf), ("min_lr", 1.0), ("eval_share", 0.5)):
            value = getattr(self, name)
            if not (0 <= value <= most and value < math.inf):
                wanted = "a number from 0" + (f" to {most:g}" if most < math.inf else "")
                raise ArgumentError(expected(wanted, of=self.flag(name), got=value, do="give another"))

    def _check_windows(self) -> None:
        if self.recipe not in RECIPES:
            raise ArgumentError(expected(f"one of {', '.join(RECIPES)}", of="--recipe with --model", got=repr(self.recipe), do="name one of these"))
        if self.moments not in MOMENTS:
            raise ArgumentError(expected(f"one of {', '.join(MOMENTS)}", of="--moments", got=repr(self.moments), do="name one of these"))
        if self.micro_batch is not None and self.batch % self.micro_batch:
            wanted = f"a divisor of the {self.batch} windows of --batch"
            raise ArgumentError(expected(wanted, of="--micro-batch", got=self.micro_batch, do="choose another"))
        if self.seq_len % BLOCKS.get(self.recipe, 1):
            wanted = f"a multiple of {BLOCKS[self.recipe]}, the block of {self.recipe}"
            raise ArgumentError(expected(wanted, of="--seq-len", got=self.seq_len, do="give another, or another --recipe"))

    def _check_adapters(self) -> None:
        if self.base_format not in BASE_FORMATS:
            got = repr(self.base_format)
            raise ArgumentError(expected(f"one of {', '.join(BASE_FORMATS)}", of="--base-format", got=got, do="name one of these"))
        if len(set(self.lora_targets)) != len(self.lora_targets):
            raise ArgumentError(expected("different names", of="--lora-targets", got=",".join(self.lora_targets), do="name each once"))
        without = {"lora_alpha": None, "lora_targets": (), "base_format": AS_IS, "merge": False}
        needing_adapters = [name for name, value in without.items() if getattr(self, name) != value]
        if needing_adapters and not self.lora:
            raise ArgumentError(expected("--lora with it", of=self.flag(needing_adapters[0]), got="none", do="give --lora RANK, or leave it out"))
        if self.lora and self.from_config:
            got = f"the configuration {self.model}"
            raise ArgumentError(expected("a directory with weights", of="--model with --lora", got=got, do="name one, or leave --lora out"))

    @property
    def from_config(self) -> bool:
        """Whether the model begins at random."""
        return self.model.endswith(".json")

    @property
    def alpha(self) -> float:
        """The factor of adapters times their rank."""
        return 2.0 * self.lora if self.lora_alpha is None else self.lora_alpha

    @classmethod
    def from_command_line(cls, arguments: Mapping[str, Any]) -> Self:
        """The options among the command line's ``arguments``, with defaults for the others. Raises ``ArgumentError`` for those that go with the demo
        alone."""
        values = cls.read(arguments)
        if "data" not in values:
            raise ArgumentError(expected("--data with it", of="--model", got="none", do=f"name files of {', '.join(KINDS)}"))
        options = cls(**values)._with_decay()
        options._check_used(values)
        return options

    def _check_used(self, given: Mapping[str, Any]) -> None:
        """Raise ``ArgumentError`` for an option that was ``given`` and changes nothing beside the others. A saved run may have such a one."""
        if "eval_share" in given and self.eval_data:
            raise ArgumentError(expected("no --eval-data beside it", of="--eval-share", got="some", do="leave one of them out"))
        if self.eval_every and not self.eval_data and not self.eval_share:
            raise ArgumentError(
                expected("something that is held out", of="--eval-every", got="--eval-share 0", do="give --eval-data, or leave it out")
            )

    def _with_decay(self) -> Self:
        """With ``decay_steps`` as a number, so that a run that is resumed for more steps keeps its learning rates."""
        return self if self.decay_steps is not None else replace(self, decay_steps=self.steps)

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        values = {name: value for name, value in arguments.items() if name in OWN and value is not None}
        for name in ("model", "tokenizer"):
            if name in values:
                values[name] = str(Path(values[name]).absolute())
        for name in ("data", "eval_data"):
            if name in values:
                values[name] = found_files(values[name], cls.flag(name))
        if "lora_targets" in values:
            values["lora_targets"] = names_in(values["lora_targets"], "--lora-targets")
        return values


OWN = tuple(field.name for field in fields(FinetuneOptions))
"""The names of the options."""
