"""Context parallelism as a rewriting of the op list: each process of a group has a part of every sequence, and attention alone looks at more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.compute_pipeline.mixtures import of_mixtures
from fusible.errors import ArgumentError, expected
from fusible.ops import AllToAllAttention, ContextParallelAttention, DotProductAttention, Op, RingAttention
from fusible.ops.messages import Communicates
from fusible.ops.protocols import OpaqueCode
from fusible.ops.sharing import Process

__all__ = ["CONTEXT_PARALLEL", "context_parallel"]

CONTEXT_PARALLEL: dict[str, type[ContextParallelAttention]] = {"all_to_all": AllToAllAttention, "ring": RingAttention}
"""The ways in which processes attend to what the others have."""


def context_parallel(ops: Sequence[Op], process: Process, group: Any, way: str = "all_to_all") -> list[Op]:
    """What each of ``ops`` becomes in ``process`` of ``group``, which has the r-th and the r-th last part of every sequence. ``way``: a name in
    ``CONTEXT_PARALLEL``.

    Raises ``ShapeError`` where the heads of attention cannot be shared out equally, ``ArgumentError`` for an op that needs more than its own tokens.
    """
    return [op if mixed else _rewritten(op, process, group, CONTEXT_PARALLEL[way]) for op, mixed in zip(ops, of_mixtures(ops), strict=True)]


def _rewritten(op: Op, process: Process, group: Any, kind: type[ContextParallelAttention]) -> Op:
    if isinstance(op, DotProductAttention):
        return kind.of(op, group, process)
    if not (op.rows_alone or isinstance(op, Communicates)) or isinstance(op, OpaqueCode):
        wanted, do = "self-attention, mixtures of experts, and ops that compute each row from that row alone", "leave out the mesh's dimension cp"
        raise ArgumentError(expected(wanted, of="a list with context parallelism", got=repr(op), do=do))
    return op
