"""How a layer is shared out to the processes of a tensor-parallel group."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist

from fusible import ops
from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.nvte import Tensor
from fusible.ops import Op

__all__ = ["TensorParallel", "group_size", "parallel_product", "share"]


class TensorParallel(NamedTuple):
    """The options of a tensor-parallel layer, as they take effect: in a group of one process there is nothing to share out."""

    mode: str | None
    group: Any
    size: int
    sequence: bool

    @classmethod
    def of(cls, mode: str | None, group: Any, sequence: bool, layer: str) -> TensorParallel:
        """Raises ``ArgumentError`` for an unknown mode and where ``group`` is none of this process."""
        if mode not in (None, "column", "row"):
            raise ArgumentError(expected("None, 'column' or 'row'", of=f"{layer}'s tensor_parallel_mode", got=repr(mode), do="name one of these"))
        size = 1 if mode is None else group_size(group, layer)
        return cls(None, None, 1, False) if size == 1 else cls(mode, group, size, sequence)


def group_size(group: Any, layer: str) -> int:
    """The number of processes in ``group`` (None: all of them). Raises ``DTypeError`` for what is no group, ``ArgumentError`` where there is none, or
    this process is not in it."""
    of = f"{layer}'s process group"
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(expected("an initialized torch.distributed", of=of, got="none", do="call torch.distributed.init_process_group first"))
    try:
        size = dist.get_world_size(group)
    except (AttributeError, TypeError, ValueError) as error:
        raise DTypeError(expected("a group of torch.distributed, or None", of=of, got=f"a {type(group).__name__}", do="pass one")) from error
    if size < 1:
        raise ArgumentError(expected("a group that this process belongs to", of=of, got="another", do="make the layer in its processes alone"))
    return size


def parallel_product(weight: Tensor, mode: str | None, group: Any, sequence: bool) -> Op:
    """The product of x with a process's part of a weight; ``mode`` and ``sequence``: of ``TensorParallel``."""
    if mode is None:
        return ops.MMT(weight)
    parallel = ops.ColumnParallelMMT if mode == "column" else ops.RowParallelMMT
    return parallel(weight, group=group, sequence_parallel=sequence)


def share(features: int, size: int, what: str) -> int:
    """A process's part of ``features``. Raises ``ShapeError`` where ``size`` processes cannot have equal ones."""
    if features % size:
        raise ShapeError(expected(f"a multiple of {size}, the processes that share them", of=what, got=features, do="choose another size or group"))
    return features // size
