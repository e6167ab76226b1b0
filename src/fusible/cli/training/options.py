"""The options of a training run, as a value that refuses illegal combinations. Imports no torch: the command line's help reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from fusible.cli.lists import any_of, check_names, names_in
from fusible.cli.run_options import RunOptions
from fusible.errors import ArgumentError, expected

__all__ = ["BF16_LAYERS", "BLOCKS", "BYTES", "EXECUTORS", "FP8_FORMATS", "FP8_RECIPES", "RECIPES", "TrainOptions", "check_executor"]

RECIPES = ("bf16", "fp32", "delayed", "current", "mxfp8", "block", "nvfp4")
FP8_RECIPES = ("delayed", "current", "mxfp8", "block")
_QUANTIZING = (*FP8_RECIPES, "nvfp4")
EXECUTORS = ("eager", "xla")
BF16_LAYERS = ("first", "last", "head")
FP8_FORMATS = ("hybrid", "e4m3")
BYTES = 256
"""The values of a byte: what is embedded, and what the model chooses among."""

BLOCKS = {"mxfp8": 32, "nvfp4": 16}
"""The block size of a recipe. Rows and columns of every quantized matrix have to be multiples of it."""


def check_executor(name: str) -> None:
    """Raise ``ArgumentError`` for an ``--executor`` that is none."""
    if name not in EXECUTORS:
        raise ArgumentError(expected(" or ".join(EXECUTORS), of="--executor", got=repr(name), do="name one of these"))


@dataclass(frozen=True)
class TrainOptions(RunOptions):
    """The options of a run. Two runs on one machine whose options differ in ``steps`` alone are bit-identical as long as both last.

    ``recipes``: names in ``RECIPES``. ``text``: a path, or None for the interpreter's documentation topics. ``bf16_layers``: names in
    ``BF16_LAYERS``, the layers that no recipe quantizes: the first and the last transformer block, and the head. ``fp8_format``: Transformer Engine's
    option of that name for all of ``FP8_RECIPES``. E4M3 forward and, for gradients, E5M2 (``"hybrid"``) or E4M3; None for each recipe's default.
    ``experts``: of the mixture in each transformer block, of which a byte takes ``top_k``; 0 for layers that all bytes take.
    """

    LISTS: ClassVar[tuple[str, ...]] = ("recipes", "bf16_layers")
    TYPES: ClassVar[Mapping[str, tuple[type, ...]]] = {
        **dict.fromkeys(("text", "fp8_format"), (str, type(None))),
        "executor": (str,),
        "lr": (float, int),
    }
    CHANGED: ClassVar[tuple[str, ...]] = ("steps", "text")
    SINCE: ClassVar[Mapping[str, Any]] = {"bf16_layers": [], "fp8_format": None, "experts": 0, "top_k": 2}
    FLAGS: ClassVar[Mapping[str, str]] = {"recipes": "recipe"}

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
    bf16_layers: tuple[str, ...] = ()
    fp8_format: str | None = None
    experts: int = 0
    top_k: int = 2

    def __post_init__(self) -> None:
        self.check_types()
        self.check_least(1, "steps", "layers", "heads", "seq_len", "batch", "decay_steps", "top_k")
        self.check_range(self.steps, self.lr, self.seed)
        if self.hidden < 1 or self.hidden % (2 * self.heads):
            wanted = f"a multiple of twice the {self.heads} heads (rotary embeddings pair columns)"
            raise ArgumentError(expected(wanted, of="--hidden", got=self.hidden, do="change one of them"))
        self._check_names()
        self._check_precision()
        self._check_experts()
        for recipe in self.recipes:
            for of, size in (("--hidden", self.hidden), ("--batch times --seq-len", self.batch * self.seq_len)):
                if size % BLOCKS.get(recipe, 1):
                    wanted = f"a multiple of {BLOCKS[recipe]}, the block of {recipe}"
                    raise ArgumentError(expected(wanted, of=of, got=size, do="give another size, or leave that recipe out"))

    def _check_names(self) -> None:
        check_names(self.recipes, RECIPES, "--recipe")
        if len(set(self.recipes)) != len(self.recipes):
            raise ArgumentError(expected("different recipes", of="--recipe", got=",".join(self.recipes), do="name each once"))
        check_executor(self.executor)

    def _check_precision(self) -> None:
        unknown = [name for name in self.bf16_layers if name not in BF16_LAYERS]
        if unknown or len(set(self.bf16_layers)) != len(self.bf16_layers):
            got = repr(unknown[0]) if unknown else ",".join(self.bf16_layers)
            raise ArgumentError(expected(any_of(BF16_LAYERS), of="--bf16-layers", got=got, do="name each once"))
        if "head" in self.bf16_layers and all(map(self.in_bf16, range(self.layers))):
            wanted, got = "something left to quantize", f"{','.join(self.bf16_layers)} of --layers {self.layers}"
            raise ArgumentError(expected(wanted, of="--bf16-layers", got=got, do="give more layers, or name fewer"))
        if self.fp8_format not in (None, *FP8_FORMATS):
            raise ArgumentError(expected(" or ".join(FP8_FORMATS), of="--fp8-format", got=repr(self.fp8_format), do="name one of these"))

    def _check_experts(self) -> None:
        self.check_least(0, "experts")
        if not self.experts:
            return
        if self.top_k > self.experts:
            raise ArgumentError(expected(f"at most the {self.experts} experts", of="--top-k", got=self.top_k, do="choose another"))
        if self.executor != "eager":
            of, do = "--executor with --experts", "leave it out: compiled programs do the same whatever the values"
            raise ArgumentError(expected("eager", of=of, got=self.executor, do=do))
        kept = [name for name in self.bf16_layers if name != "head"]
        if kept:
            raise ArgumentError(expected("head alone", of="--bf16-layers with --experts", got=",".join(kept), do="leave the blocks out"))

    def in_bf16(self, layer: int) -> bool:
        """Whether no recipe quantizes the products of that transformer block."""
        return (layer == 0 and "first" in self.bf16_layers) or (layer == self.layers - 1 and "last" in self.bf16_layers)

    @classmethod
    def from_command_line(cls, arguments: Mapping[str, Any]) -> Self:
        """The options among the command line's ``arguments`` (``recipe`` as one comma-separated string), with defaults for the others."""
        options = cls(**cls.read(arguments))
        options._check_used(arguments)
        return options

    def _check_used(self, arguments: Mapping[str, Any]) -> None:
        """Raise ``ArgumentError`` for an option of the command line that changes nothing beside the others. A saved run may have such a one."""
        quantizing, fp8 = [set(self.recipes) & set(names) for names in (_QUANTIZING, FP8_RECIPES)]
        for name, used, wanted, got in (
            ("top_k", self.experts, "--experts beside it", "none"),
            ("fp8_format", fp8, f"a --recipe of {any_of(FP8_RECIPES)}", ",".join(self.recipes)),
            ("bf16_layers", quantizing, "a --recipe that quantizes", ",".join(self.recipes)),
        ):
            if name in arguments and not used:
                raise ArgumentError(expected(wanted, of=self.flag(name), got=got, do="give it, or leave this out"))

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        names = {field.name for field in fields(cls)}
        values = {name: value for name, value in arguments.items() if name in names}
        for name in cls.LISTS:
            if (said := cls.FLAGS.get(name, name)) in arguments:
                values[name] = names_in(arguments[said], cls.flag(name))
        if "text" in values:
            values["text"] = str(Path(values["text"]).absolute())
        return values
