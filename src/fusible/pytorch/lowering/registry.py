"""The table of lowerings: each op as torch's own functions, for graphs that other processes and runtimes take (``torch.export``, ONNX)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fusible.errors import ArgumentError, expected
from fusible.nvte import DType, Type, is_quantized_type, te_to_torch_dtype
from fusible.ops import Op

__all__ = ["Args", "LOWERINGS", "Lowering", "lowered", "lowers", "written"]

Args = Mapping[str, torch.Tensor]
"""An op's parameters by name, the values of quantized ones in fp32; and its side inputs, by name."""

Lowering = Callable[[Any, torch.Tensor, Args], Any]
"""``(op, x, args)``: y, or a tuple of it and the op's side outputs, by name. ``x [*, width]`` has the dimensions that the caller gave it; one of two
dimensions is one sequence. ``op`` is bound by a plan."""

LOWERINGS: dict[type[Op], Lowering] = {}


def lowers(*kinds: type[Op]) -> Callable[[Lowering], Lowering]:
    """Register the lowering of ops of these very classes: a subclass may talk to other processes."""

    def register(lowering: Lowering) -> Lowering:
        LOWERINGS.update(dict.fromkeys(kinds, lowering))
        return lowering

    return register


def lowered(ops: Sequence[Op], args: Iterator[torch.Tensor], x: torch.Tensor, sides: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """y of the inference pass of ``ops``, a plan's, on x. ``args``: the parameters of all ops, in order; ``sides``: the side values that come from
    the caller."""
    values = [*sides.items()]
    for op in ops:
        named = {name: next(args) for name in op.arg_names} | {name: _taken(values, name) for name in op.side_inputs}
        result = _lowering_of(op)(op, x, named)
        x, left = result if isinstance(result, tuple) else (result, {})
        values += left.items()
    return x


def written(y: torch.Tensor, type: Type | None) -> torch.Tensor:
    """A result as the next op takes it: rounded to ``type``. What that quantizes is left as it is, and rounded once, by who reads it."""
    if type is None or is_quantized_type(type):
        return y
    assert isinstance(type, DType)
    return y.to(te_to_torch_dtype(type))


def _taken(values: list[tuple[str, torch.Tensor]], name: str) -> torch.Tensor:
    """The latest side value of the name, which is open no more."""
    place = max(place for place, (own, _) in enumerate(values) if own == name)
    return values.pop(place)[1]


def _lowering_of(op: Op) -> Lowering:
    found = LOWERINGS.get(type(op))
    if found is None:
        do = "export what is before it, or after it"
        raise ArgumentError(expected("operations with a lowering", of="a model to export", got=repr(op), do=do))
    return found
