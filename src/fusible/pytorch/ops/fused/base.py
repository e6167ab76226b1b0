"""Bases of the fused operations: each names a sequence of basic operations, and adapts the engine's fused passes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from fusible.compute_pipeline import group_ops
from fusible.errors import ArgumentError, NotServedError, expected
from fusible.fusions import registered
from fusible.ops import MMT
from fusible.pytorch.ops import op_passes
from fusible.pytorch.ops.basic import BasicLinear
from fusible.pytorch.ops.op import BasicOperation, FusedOperation, FusibleOperation

__all__ = ["Adapted", "AdaptedBackward", "AdaptedForward", "Overlapping", "Part", "replaced"]


class Part(NamedTuple):
    """A place in a sequence: the argument that names it, the classes that may stand there, and whether it may be left out."""

    name: str
    classes: tuple[type, ...]
    optional: bool = False

    def fits(self, op: object) -> bool:
        """Whether the operation may stand there: one without code of the caller's; a linear layer only where its product is all that it does."""
        if not isinstance(op, self.classes) or (isinstance(op, FusibleOperation) and any(op.fuses)):
            return False
        return not isinstance(op, BasicLinear) or type(op.bound_op.op) is MMT


class Adapted(FusedOperation):
    """A fused operation of ``parts``. Its arithmetic is that of the fused passes in ``fusible.fusions`` which the engine finds for their ops.

    In a ``Sequential`` a plan calls those passes by itself, so that placing or registering one costs no more than leaving the choice to the engine.
    ``fuser_forward`` and ``fuser_backward`` are for code that calls, or overrides, them.
    """

    parts: ClassVar[tuple[Part, ...]]

    def __init__(self, **operations: BasicOperation | None) -> None:
        """Raises ``ArgumentError`` for an operation that cannot stand in its place."""
        for part in self.parts:
            op = operations[part.name]
            if not part.fits(op) and not (op is None and part.optional):
                wanted = " or ".join([*(each.__name__ for each in part.classes), *(["None"] if part.optional else [])])
                of, do = f"{part.name} of {type(self).__name__}", "give one, and none that communicates with other processes"
                raise ArgumentError(expected(wanted, of=of, got=type(op).__name__, do=do))
        super().__init__([op for part in self.parts if (op := operations[part.name]) is not None])

    @property
    def adapts(self) -> tuple[bool, bool]:
        own = type(self)
        forward = own.fuser_forward is AdaptedForward.fuser_forward
        return forward, own.fuser_backward is AdaptedBackward.fuser_backward


class AdaptedForward(Adapted):
    """A fused forward; the backward is that of the basic operations."""

    fuser_forward = op_passes.fuser_forward  # pyright: ignore[reportAssignmentType] - whose first parameter is a module

    @classmethod
    def fuse_forward_ops(cls, ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """``ops`` with each sequence of the parts put together, under any recipe and without one, where the engine has a fused forward of some."""
        return replaced(cls, ops)


class AdaptedBackward(Adapted):
    """A fused backward; the forward is that of the basic operations."""

    fuser_backward = op_passes.fuser_backward  # pyright: ignore[reportAssignmentType]

    @classmethod
    def fuse_backward_ops(cls, ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        """As ``fuse_forward_ops``, of a fused backward."""
        return replaced(cls, ops)


class Overlapping(FusedOperation):
    """A tensor-parallel linear layer that overlaps its products with their communication, piece by piece.

    That takes communication buffers which several GPUs map (``CommOverlap`` of tex), and products that start on a piece as it arrives. No backend has
    them, so that none can be made, and nothing is put together. The basic operations compute the same, one after another.
    """

    def __init__(self, *, linear: Any, bias: Any, reduce_scatter: Any) -> None:
        """Raises ``NotServedError``."""
        of, do = type(self).__name__, "leave BasicLinear, Bias and ReduceScatter as they are"
        raise NotServedError(expected("a backend that overlaps communication buffers with products", of=of, got="none", do=do))


def replaced(fused: type[Adapted], ops: Sequence[FusibleOperation], *, always: bool = False) -> list[FusibleOperation]:
    """``ops`` with every sequence of at least two that fits ``fused`` put together, from the left, the longest first.

    Unless ``always``, only where the engine has a fused pass for some of them.
    """
    result: list[FusibleOperation] = []
    left = list(ops)
    while left:
        readings = (found for found in _readings(fused.parts, left) if len(found) > 1)
        chosen = next((found for found in readings if always or _gains(fused, list(found.values()))), None)
        if chosen is None:
            result.append(left.pop(0))
            continue
        result.append(fused(**{part.name: chosen.get(part.name) for part in fused.parts}))
        del left[: len(chosen)]
    return result


def _readings(parts: Sequence[Part], ops: Sequence[FusibleOperation]) -> Iterable[dict[str, BasicOperation]]:
    """The ways in which the first of ``ops`` are the parts, the longest first."""
    if not parts:
        yield {}
        return
    part, *rest = parts
    if ops and part.fits(ops[0]):
        op: Any = ops[0]
        for found in _readings(rest, ops[1:]):
            yield {part.name: op, **found}
    if part.optional:
        yield from _readings(rest, ops)


def _gains(fused: type[Adapted], ops: Sequence[BasicOperation]) -> bool:
    kind = "forward" if issubclass(fused, AdaptedForward) else "backward"
    return any(group.fusion is not None for group in group_ops([op.bound_op.op for op in ops], registered(kind)))
