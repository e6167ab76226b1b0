"""Keyword arguments that a call hands to operations in it, and the operations that are called as they stand because of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fusible.errors import ArgumentError, DTypeError, OutOfRangeError, expected
from fusible.fusions import Fusion
from fusible.nvte import PassKind
from fusible.ops.protocols import OpaqueCode
from fusible.pytorch.ops.torch_operation import pass_of

if TYPE_CHECKING:
    from fusible.pytorch.ops.op import BasicOperation

__all__ = ["Passes", "check_keywords", "passes_with_keywords"]

Passes = tuple[tuple[int, int, Fusion], ...]
"""Stretches of ops that code of the caller's, or of an operation's own, computes: as of ``PlanRequest.fused``."""

_KINDS: tuple[PassKind, ...] = ("forward", "inference", "backward")


def check_keywords(each: Sequence[Mapping[str, Any]], ops: Sequence[BasicOperation], titles: Sequence[str], passes: Passes) -> None:
    """Raise for what ``basic_op_kwargs`` cannot be: ``DTypeError`` for no mapping, ``OutOfRangeError`` for another number of them than of ``ops``,
    ``ArgumentError`` for a keyword that one does not take. ``titles``: how the caller knows them."""
    if len(each) != len(ops):
        do = "give {} to those that take none"
        raise OutOfRangeError(expected(f"keyword arguments of {len(ops)} basic operations", of="basic_op_kwargs", got=len(each), do=do))
    for position, (keywords, op, title) in enumerate(zip(each, ops, titles, strict=True)):
        if not isinstance(keywords, Mapping):
            got = f"a {type(keywords).__name__}"
            raise DTypeError(expected("a mapping of names to values", of=f"the keyword arguments of {title}", got=got, do="pass a dict"))
        if not keywords or isinstance(op.bound_op.op, OpaqueCode) or op.fuses[0] or _covered(position, "forward", passes):
            continue  # the caller's own code knows what it takes
        unknown = [name for name in keywords if name not in op.keywords]
        if unknown:
            wanted = f"no keyword arguments but {', '.join(sorted(op.keywords))}" if op.keywords else "no keyword arguments"
            raise ArgumentError(expected(wanted, of=f"{title}.op_forward", got=", ".join(unknown), do="leave them out"))


def passes_with_keywords(positions: Collection[int], ops: Sequence[BasicOperation], passes: Passes) -> Passes:
    """``passes`` of a call that gives keywords to the ops at ``positions``: each of these is called by its ``fuser_forward`` and ``fuser_backward``,
    unless it is the caller's own code anyway."""
    found = list(passes)
    for position in positions:
        for kind in _KINDS:
            if isinstance(ops[position].bound_op.op, OpaqueCode) or _covered(position, kind, found):
                continue
            found = [bound_op for bound_op in found if bound_op[2].kind != kind or not bound_op[0] <= position < bound_op[1]]
            found.append((position, position + 1, Fusion(kind, pass_of(ops[position], kind, 1), ())))
    return tuple(found)


def _covered(position: int, kind: PassKind, passes: Collection[tuple[int, int, Fusion]]) -> bool:
    return any(fusion.kind == kind and fusion.opaque and start <= position < stop for start, stop, fusion in passes)
