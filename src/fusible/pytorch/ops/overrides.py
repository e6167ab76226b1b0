"""Which passes a class of operations has of its own, and must have."""

from __future__ import annotations

from fusible.errors import DTypeError, expected
from fusible.pytorch.ops.protocols import BasicOperationLike

__all__ = ["check_derived", "check_overrides", "rewritten"]

_PASSES = ("op_forward", "fuser_forward"), ("op_backward", "fuser_backward")


def check_derived(cls: type, *bases: type) -> None:
    """Raise ``DTypeError`` for one of the classes that operations derive from: there is nothing that it would do."""
    if cls in bases:
        raise DTypeError(expected("a class derived from it", of=cls.__name__, got="the class itself", do="derive one that has passes of its own"))


def rewritten(cls: type[BasicOperationLike]) -> tuple[bool, bool]:
    """Whether a class that derives from an operation of ours overrides the forward, and the backward, by code in torch."""
    maker = next(base for base in cls.__mro__ if "make_op" in vars(base))
    later = cls.__mro__[: cls.__mro__.index(maker)]
    forward, backward = (any(name in vars(base) for base in later for name in names) for names in _PASSES)
    return forward, backward


def check_overrides(op: BasicOperationLike, name: str) -> None:
    """Raise ``NotImplementedError`` where extra tensors would have to pass by ``op_forward`` or ``op_backward``."""
    if op.num_extra_inputs or op.num_extra_outputs:
        extra = f"{op.num_extra_inputs} extra inputs and {op.num_extra_outputs} extra outputs"
        raise NotImplementedError(f"{type(op).__name__} has {extra}, so it must override {name}")
