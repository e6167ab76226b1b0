"""The arguments that NVIDIA's modules share: tensor parallelism, and options that are refused or change nothing."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fusible.compat.te_overlap import warn_of_no_overlap
from fusible.errors import ArgumentError, NotServedError, expected
from fusible.nvte import Tensor
from fusible.ops import Op
from fusible.pytorch.ops.basic.parallel import group_size, parallel_product, share

__all__ = ["OVERLAP", "Sharding", "check_mode", "handed_on", "layer_name", "mark_shared", "part_name", "refuse", "refuse_delay"]


OVERLAP = ("ub_bulk_wgrad", "ub_bulk_dgrad", "ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad")
"""The arguments by which a layer is asked to overlap its products with communication."""


def handed_on(arguments: Mapping[str, Any], to: Callable[..., Any], *but: str) -> dict[str, Any]:
    """The arguments of a caller that ``to`` has parameters for, by the same names; without those named in ``but``."""
    return {name: arguments[name] for name in _parameters(to) if name in arguments and name not in but}


@functools.cache
def _parameters(of: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(of).parameters if name != "self")


_unnamed = itertools.count(1)


def layer_name(name: str | None) -> str:
    """The name of a layer that was given ``name``. Those that were given none are counted, as by NVIDIA's modules."""
    return f"Layer_{next(_unnamed)}" if name is None else name


def part_name(name: str | None, part: str) -> str | None:
    """The name that is given to a layer inside the one that was given ``name``; None where that was given none."""
    return None if name is None else f"{name}.{part}"


class Sharding(NamedTuple):
    """The tensor parallelism of a layer: ``size`` processes of ``group`` (None until ``set_tensor_parallel_group``, where only the size is known).
    ``sequence``: sequence parallelism, which shards the rows of activations, too."""

    group: Any
    size: int
    sequence: bool

    @classmethod
    def of(cls, tp_group: Any, tp_size: int, sequence_parallel: bool, layer: str) -> Sharding:
        """Raises as ``group_size``."""
        size = tp_size if tp_group is None else group_size(tp_group, layer)
        return cls(tp_group, size, size > 1 and sequence_parallel)

    def share(self, features: int, mode: str | None, wanted: str, what: str) -> int:
        """The features that one process has: a part of ``features`` where ``mode`` is the ``wanted`` one, else all."""
        return share(features, self.size, what) if mode == wanted else features

    def product(self, weight: Tensor, mode: str | None) -> Op:
        """The product of ``x`` with a process's part of a weight."""
        return parallel_product(weight, None if self.size == 1 else mode, self.group, self.sequence)

    def check(self, layer: str) -> None:
        """Raise ``ArgumentError`` for a call of a sharded layer that has no group yet."""
        if self.size > 1 and self.group is None:
            do = "pass tp_group, or call set_tensor_parallel_group"
            raise ArgumentError(expected(f"a group of {self.size} processes", of=f"a call of {layer}", got="none", do=do))


def check_mode(mode: str | None, layer: str) -> None:
    """Raise ``ArgumentError`` for an unknown ``parallel_mode``."""
    if mode not in (None, "column", "row"):
        raise ArgumentError(expected("None, 'column' or 'row'", of=f"parallel_mode of {layer}", got=repr(mode), do="name one of these"))


_ELSE = "leave it out: the same is computed, one after the other"


def refuse(layer: str, do: str = _ELSE, **asked: Any) -> None:
    """Raise ``NotServedError`` for the first of the arguments ``asked`` that is in use: neither None nor False."""
    for name, value in asked.items():
        if value:
            raise NotServedError(expected(f"{name}={type(value)() if isinstance(value, bool) else None}", of=layer, got=repr(value), do=do))


def mark_shared(parameter: Any, dim: int) -> None:
    """Set the attributes by which frameworks (Megatron) know along which dimension a parameter is sharded."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


def refuse_delay(module: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ``NotServedError`` where a constructor's arguments ask for ``delay_wgrad_compute``. Warn where they ask a layer that communicates to
    overlap that with products."""
    do = "leave it out: the gradients are there after backward"
    refuse(type(module).__name__, do, delay_wgrad_compute=arguments["delay_wgrad_compute"])
    if module.sequence_parallel and any(arguments[name] for name in OVERLAP):
        warn_of_no_overlap()
