"""Expert parallelism as a rewriting of the op list: processes, each with its own tokens, share out the experts of a mixture, and exchange the tokens
(Lepikhin et al. 2020, arXiv:2006.16668)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.compute_pipeline.tensor_parallel import Holding, Rewritten
from fusible.errors import ArgumentError, expected
from fusible.ops import CombineTokens, DispatchTokens, GroupedMMT, Op, ReceiveTokens, SendTokens
from fusible.ops.messages import Communicates
from fusible.ops.sharing import Part, Process

__all__ = ["expert_parallel"]


def expert_parallel(ops: Sequence[Op], process: Process, group: Any) -> list[Rewritten]:
    """What each of ``ops`` becomes in ``process`` of ``group``: from where tokens are dispatched to where they are combined it computes with its
    experts alone, with all processes' tokens; everything else with its own tokens.

    Raises ``ShapeError`` where the experts cannot be shared out equally, ``ArgumentError`` for an op between that needs more than rows of groups.
    """
    result: list[Rewritten] = []
    sent: DispatchTokens | None = None
    for op in ops:
        made, holding = op, Holding(partial=True)
        if isinstance(op, DispatchTokens):
            made = sent = SendTokens(op.groups, op.top_k, group=group, process=process, sizes=op.sizes)
        elif sent is not None and isinstance(op, CombineTokens):
            made, sent = ReceiveTokens(sent.groups, sent.top_k, group=group, process=process), None
        elif sent is not None and isinstance(op, GroupedMMT):
            made, holding = op.share_groups(process), Holding(0, (Part(op.groups, name="experts"),))
        elif sent is not None:
            _check_between(op)
        result.append(Rewritten(made, dict.fromkeys(op.arg_names, holding)))
    return result


def _check_between(op: Op) -> None:
    """Raise unless the op makes of each row what it is, whichever process has it."""
    if not op.rows_alone or isinstance(op, Communicates) or op.side_inputs or op.side_outputs or op.arg_names:
        do = "put it before the tokens are dispatched, or after they are combined"
        wanted = "grouped products, and ops without parameters that compute each row from that row alone"
        raise ArgumentError(expected(wanted, of="the experts that processes share out", got=repr(op), do=do))
