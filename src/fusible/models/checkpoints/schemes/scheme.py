"""A quantization scheme of checkpoints: what its ``quantization_config`` says, and how its weights are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusible.errors import CheckpointError, expected
from fusible.models.checkpoints.layouts import WeightLayout

__all__ = ["Config", "Scheme", "unknown"]

Config = Mapping[str, Any]
"""The ``quantization_config`` of a model, as its config has it."""


@dataclass(frozen=True, eq=False)
class Scheme:
    """``name``: what users call it. ``fits(config)``: whether a ``quantization_config`` is one of this scheme. ``layouts(config)``: how weights of
    such a checkpoint may be stored; the first that fits a weight's tensors is its own. Raises ``CheckpointError`` for what Fusible does not read.

    ``high_precision(config)``: the names or patterns of modules that are not quantized, as the config has them. ``written(layout, modules)``: the
    ``quantization_config`` of a checkpoint whose weights have ``layout``, but for those of ``modules``.
    """

    name: str
    fits: Callable[[Config], bool]
    layouts: Callable[[Config], Sequence[WeightLayout]]
    high_precision: Callable[[Config], Sequence[str]]
    written: Callable[[WeightLayout, Sequence[str]], dict[str, Any]]

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__


def unknown(what: str, known: Sequence[str], got: object) -> CheckpointError:
    """What to raise for an entry of a ``quantization_config`` that is none of ``known``."""
    do = "convert the model to one of these, or load it unquantized"
    return CheckpointError(expected(f"one of {', '.join(known)}", of=f"{what} of quantization_config", got=repr(got)[:80], do=do))
