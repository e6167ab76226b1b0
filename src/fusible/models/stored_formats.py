"""In which number formats a checkpoint has the weights that a recipe would quantize. Those stay, whatever a model is asked to hold its weights in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.models.assembly import Read
from fusible.models.parts import Experts, Product
from fusible.models.weight_formats import format_of_weight
from fusible.quantized import QuantizedTensor

__all__ = ["StoredFormats", "stored_formats"]


@dataclass(frozen=True)
class StoredFormats:
    """``counts``: of the weights that stay quantized, by the name of their format (``format_of_weight``), how many; ``plain``: how many take any."""

    counts: Mapping[str, int]
    plain: int

    @property
    def names(self) -> str:
        """``"fp8 and nvfp4"``."""
        return " and ".join(sorted(self.counts))

    @property
    def total(self) -> int:
        return self.plain + sum(self.counts.values())

    def others(self, wanted: str) -> int:
        """How many weights stay in another format than ``wanted``."""
        return sum(count for name, count in self.counts.items() if name != wanted)

    def check(self, wanted: str, *, of: str, do: str) -> None:
        """Raise ``ArgumentError`` where some weights are in another format than ``wanted`` and none is left to take it."""
        if self.others(wanted) and not self.plain:
            what = f"none, as the weights are quantized already, in {self.names}"
            raise ArgumentError(expected(what, of=of, got=wanted, do=do))


def stored_formats(blueprint: Any, source: Read) -> StoredFormats:
    """Those of the weights of ``blueprint`` that ``source`` reads, but for what stays in high precision in any model. Of quantized experts the first
    of each layer is copied, and no other weight."""
    held = [None if weight is None else format_of_weight(weight) for weight in _weights(blueprint, source)]
    return StoredFormats(Counter(name for name in held if name is not None), held.count(None))


def _weights(part: Any, source: Read) -> Iterator[Any]:
    """Of each weight the quantized tensor that stays as it is, or None."""
    if isinstance(part, Product):
        names = () if part.high_precision else part.names
        yield from (None if part.transposed else _stays(f"{name}.weight", source) for name in names)
    elif isinstance(part, Experts):
        yield from _weights_of_experts(part, source)
    elif isinstance(part, tuple):
        for each in part:
            yield from _weights(each, source)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _weights(getattr(part, field.name), source)


def _weights_of_experts(part: Experts, source: Read) -> Iterator[Any]:
    """The experts of a layer stay as they are together or not at all: the first tells whether its matrices are ones by which the layer multiplies."""
    matrices = part.matrices.values()
    quantized = all(_stays(names[0][0], source) is not None for names, _ in matrices)
    stay = quantized and all(source.quantized(names[:1], shape) is not None for names, shape in matrices)
    for names, _ in matrices:
        yield from (_stays(name, source) if stay else None for of_one in names for name in of_one)


def _stays(name: str, source: Read) -> Any:
    weight = source.checkpoint.tensor(name) if source.has(name) else None  # one that is missing is told when it is read
    return weight if isinstance(weight, QuantizedTensor) else None
