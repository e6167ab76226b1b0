"""Where in a list of ops the rows are shared out to the processes of a group: between what scatters rows and what gathers them.

There each process has the gradients of parameters from its own rows alone: the gradient is the sum over the group (Korthikanti et al. 2022,
arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence

from fusible.ops import Op
from fusible.ops.protocols import ShardsRows

__all__ = ["sharded_rows"]


def sharded_rows(ops: Sequence[Op]) -> list[ShardsRows | None]:
    """For each op the one that gathers its rows, or else the one that scattered them; None where each process has all rows, as far as the list
    tells. An op that gathers or scatters is none of those between: it computes its parameters' gradients from all rows."""
    found: list[ShardsRows | None] = [None] * len(ops)
    begin, scattered = 0, None
    for i, op in enumerate(ops):
        if not isinstance(op, ShardsRows) or op.reshards is None:
            found[i] = scattered
            continue
        if op.reshards == "gathers":
            found[begin:i] = [op] * (i - begin)
        begin, scattered = i + 1, op if op.reshards == "scatters" else None
    return found
