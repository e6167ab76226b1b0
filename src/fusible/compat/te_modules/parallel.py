"""The arguments that NVIDIA's modules share: what splits a layer between processes, and what is not served."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fusible import ops
from fusible.compat.te_overlap import warn_of_no_overlap
from fusible.errors import ArgumentError, NotServedError, expected
from fusible.nvte import Tensor
from fusible.ops import Op
from fusible.pytorch.ops.basic.parallel import group_size, share

__all__ = ["OVERLAP", "Sharding", "check_mode", "handed_on", "mark_shared", "part_name", "refuse", "refuse_delay"]


OVERLAP = ("ub_bulk_wgrad", "ub_bulk_dgrad", "ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad")
"""The arguments by which a layer is asked to overlap its products with communication."""


def handed_on(given: Mapping[str, Any], to: Callable[..., Any], *but: str) -> dict[str, Any]:
    """The arguments of a caller that ``to`` has parameters for, by the same names; without those named in ``but``."""
    return {name: given[name] for name in _parameters(to) if name in given and name not in but}


@functools.cache
def _parameters(of: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(of).parameters if name != "self")


def part_name(name: str | None, part: str) -> str | None:
    """The name of a layer inside the one that has ``name``; None where that has none."""
    return None if name is None else f"{name}.{part}"


class Sharding(NamedTuple):
    """How a layer is shared out: ``size`` processes of ``group``, which may be given later where the size is known; ``sequence``: by rows, too."""

    group: Any
    size: int
    sequence: bool

    @classmethod
    def of(cls, tp_group: Any, tp_size: int, sequence_parallel: bool, layer: str) -> Sharding:
        """Raises as ``group_size``."""
        size = tp_size if tp_group is None else group_size(tp_group, layer)
        return cls(tp_group, size, size > 1 and sequence_parallel)

    def share(self, features: int, mode: str | None, wanted: str, what: str) -> int:
        """A process's part of ``features``, where ``mode`` is the one that shares them out."""
        return share(features, self.size, what) if mode == wanted else features

    def product(self, weight: Tensor, mode: str | None) -> Op:
        """The product of ``x`` with a process's part of a weight."""
        if mode is None or self.size == 1:
            return ops.MMT(weight)
        parallel = ops.ColumnParallelMMT if mode == "column" else ops.RowParallelMMT
        return parallel(weight, group=self.group, sequence_parallel=self.sequence)

    def check(self, layer: str) -> None:
        """Raise ``ArgumentError`` where the processes are not known by the time of a call."""
        if self.size > 1 and self.group is None:
            do = "pass tp_group, or call set_tensor_parallel_group"
            raise ArgumentError(expected(f"a group of {self.size} processes", of=f"a call of {layer}", got="none", do=do))


def check_mode(mode: str | None, layer: str) -> None:
    """Raise ``ArgumentError`` for an unknown ``parallel_mode``."""
    if mode not in (None, "column", "row"):
        raise ArgumentError(expected("None, 'column' or 'row'", of=f"parallel_mode of {layer}", got=repr(mode), do="name one of these"))


_ELSE = "leave it out: the same is computed, one after the other"


def refuse(layer: str, do: str = _ELSE, **asked: Any) -> None:
    """Raise ``NotServedError`` for the first argument of those that are asked for (not None, not False)."""
    for name, value in asked.items():
        if value:
            raise NotServedError(expected(f"{name}={type(value)() if isinstance(value, bool) else None}", of=layer, got=repr(value), do=do))


def mark_shared(parameter: Any, dim: int) -> None:
    """Give a parameter the attributes by which frameworks know the dimension that a layer shares out."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


def refuse_delay(module: Any, given: Mapping[str, Any]) -> None:
    """Of a constructor's arguments, raise ``NotServedError`` for delayed gradients of weights; warn of overlap that is asked of a layer which
    communicates."""
    do = "leave it out: the gradients are there after backward"
    refuse(type(module).__name__, do, delay_wgrad_compute=given["delay_wgrad_compute"])
    if module.sequence_parallel and any(given[name] for name in OVERLAP):
        warn_of_no_overlap()
