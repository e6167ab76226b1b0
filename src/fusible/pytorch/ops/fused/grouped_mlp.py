"""``GroupedMLP_CuTeGEMMGLU`` and ``GroupedMLP_CuTeGEMMUnary``: the experts of a mixture as one operation in both passes."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from fusible.errors import ArgumentError, expected
from fusible.pytorch.ops import basic
from fusible.pytorch.ops.basic import ScaledTanhSReLU
from fusible.pytorch.ops.fused.base import AdaptedBackward, AdaptedForward, Part, replaced
from fusible.pytorch.ops.op import BasicOperation, FusibleOperation
from fusible.tex.activations import ELEMENTWISE, GATES

__all__ = ["GroupedMLP_CuTeGEMMGLU", "GroupedMLP_CuTeGEMMUnary", "fuse_glu_ops", "fuse_unary_activation_ops"]


@runtime_checkable
class GroupedLinear(Protocol):
    """An operation that multiplies groups of rows, each by a weight of its own."""

    num_groups: int
    in_features: int
    out_features: int


_GATED = tuple(getattr(basic, row.scaled) for row in GATES if row.scaled)
_UNARY = (*(getattr(basic, row.scaled) for row in ELEMENTWISE if row.scaled), ScaledTanhSReLU)


class _GroupedMLP(AdaptedForward, AdaptedBackward):
    """The three operations one after another: no backend has a kernel of all of them, which would save writing the product's result before the
    activation. ``y``, ``dx`` and all gradients are those of the three. The engine hands each the quantized type that the next one asks for."""

    def __init__(self, *, fc1: GroupedLinear, activation: BasicOperation, fc2: GroupedLinear) -> None:
        """Raises ``ArgumentError`` where the sizes do not fit."""
        super().__init__(fc1=fc1, activation=activation, fc2=fc2)  # type: ignore[arg-type]
        halves = 1 if isinstance(activation, _UNARY) else 2
        if (fc1.num_groups, fc1.out_features) != (fc2.num_groups, halves * fc2.in_features):
            of, got = f"fc1 of {type(self).__name__}", f"{fc1.num_groups} groups, out_features={fc1.out_features}"
            wanted = f"{fc2.num_groups} groups, out_features={halves * fc2.in_features}"
            raise ArgumentError(expected(wanted, of=of, got=got, do="make it fit the activation and fc2"))


class GroupedMLP_CuTeGEMMGLU(_GroupedMLP):
    """``GroupedLinear``, a gated activation scaled per row, ``GroupedLinear``, in both passes; extra inputs: split sizes, scales, split sizes."""

    parts = (
        Part("fc1", (GroupedLinear,)),
        Part("activation", _GATED),
        Part("fc2", (GroupedLinear,)),
    )


class GroupedMLP_CuTeGEMMUnary(_GroupedMLP):
    """``GroupedLinear``, an elementwise activation scaled per row, ``GroupedLinear``, in both passes; extra inputs: sizes, scales, sizes."""

    parts = (Part("fc1", (GroupedLinear,)), Part("activation", _UNARY), Part("fc2", (GroupedLinear,)))


def fuse_glu_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
    """``ops`` with each sequence of ``GroupedMLP_CuTeGEMMGLU`` put together."""
    return replaced(GroupedMLP_CuTeGEMMGLU, ops, always=True)


def fuse_unary_activation_ops(ops: list[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
    """``ops`` with each sequence of ``GroupedMLP_CuTeGEMMUnary`` put together."""
    return replaced(GroupedMLP_CuTeGEMMUnary, ops, always=True)
