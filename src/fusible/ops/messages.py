"""What passes between processes: each op that communicates derives its messages from its types and the number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from fusible import nvte
from fusible.ops.sharing import Process

__all__ = ["Communicates", "Message"]

_AMAX_BYTES = 4


class Message(NamedTuple):
    """One collective. ``what``: the name of the tensor. ``nbytes``: of what each process has after an ``all_gather``, before a ``reduce_scatter``,
    and on both sides of any other."""

    collective: Literal["all_gather", "all_reduce", "all_to_all", "reduce_scatter", "ring_shift"]
    what: str
    nbytes: int

    def sent(self, processes: int) -> float:
        """The bytes that each of the processes sends, by the algorithms that send least: a ring, which reduces and then gathers."""
        if self.collective == "ring_shift":
            return self.nbytes
        rounds = 2 if self.collective == "all_reduce" else 1
        return rounds * self.nbytes * (processes - 1) / processes


class Communicates:
    """An op of the processes of ``group`` (None: all of them). A class without a metaclass, to be named before ``Op`` among a class's bases."""

    group: Any
    process: Process | None = None
    """Which of them it is in. None where nobody has said it: then its messages are not known."""

    def messages(self, kind: nvte.PassKind, rows: int) -> Iterator[Message]:
        """Those of a pass, in order. ``rows``: of x in this process. The op is one that a plan has bound."""
        raise NotImplementedError

    def rows_of_y(self, rows: int) -> int:
        """The rows of y in this process, where x has ``rows``."""
        return rows


def amax_message(type: nvte.Type | None, what: str, kind: nvte.PassKind) -> Iterator[Message]:
    """That of the largest magnitude of a tensor which processes quantize by one scale; inference under delayed scaling observes none."""
    if isinstance(type, nvte.QuantizedType) and type.per_tensor and not (type.delayed and kind == "inference"):
        yield Message("all_reduce", f"amax of {what}", _AMAX_BYTES)
