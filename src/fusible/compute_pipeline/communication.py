"""What passes between processes in the passes of a plan, derived from its types: collectives, with their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fusible.compute_pipeline.plan import Plan
from fusible.nvte import PassKind
from fusible.ops import Op
from fusible.ops.messages import Communicates, Message

__all__ = ["Sent", "describe_messages", "messages_of"]


class Sent(NamedTuple):
    """A message, the op that sends it, and the number of its processes."""

    op: Op
    message: Message
    processes: int


def messages_of(plan: Plan, kind: PassKind, rows: int) -> list[Sent]:
    """Those of a pass on an x of ``rows`` rows, in the order of the ops."""
    found = [[*_of_op(op, kind, at)] for op, at in _rows(plan, rows)]
    return [sent for of_op in (found[::-1] if kind == "backward" else found) for sent in of_op]


def _of_op(op: Op, kind: PassKind, rows: int) -> Iterator[Sent]:
    if isinstance(op, Communicates) and op.process is not None:
        yield from (Sent(op, message, op.process.size) for message in op.messages(kind, rows))


def _rows(plan: Plan, rows: int) -> Iterator[tuple[Op, int]]:
    """Each op, with the rows of its x in this process."""
    for op in plan.ops:
        yield op, rows
        rows = op.rows_of_y(rows) if isinstance(op, Communicates) else rows


def describe_messages(plan: Plan, rows: int) -> list[str]:
    """A line for each message of forward and backward on an x of ``rows`` rows, and what each process sends in all; nothing where there are none."""
    lines: list[str] = []
    for kind in ("forward", "backward"):
        sent = messages_of(plan, kind, rows)
        cells = [(str(s.op.position), s.op.title, s.message.collective, s.message.what, f"{s.message.nbytes:,} bytes") for s in sent]
        widths = [max((len(cell[i]) for cell in cells), default=0) for i in range(5)]
        total = sum(s.message.sent(s.processes) for s in sent)
        lines += ["", f"between processes, {kind}: each sends {total:,.0f} bytes"] if sent else []
        lines += [
            "  " + "  ".join([*(text.ljust(width) for text, width in zip(cell[:4], widths, strict=False)), cell[4].rjust(widths[4])])
            for cell in cells
        ]
    return lines
