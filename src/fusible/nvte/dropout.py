"""Functions for dropout, drawn from an explicit seed."""

from __future__ import annotations

from fusible import tex
from fusible.nvte.casting import cast_checked
from fusible.nvte.dtype import DType, Type
from fusible.nvte.tensor import Tensor

__all__ = ["ddropout", "dropout"]


def dropout(x: Tensor, probability: float, seed: Tensor, offset: int, type: Type) -> tuple[Tensor, Tensor]:
    """``(y, mask)``: each element of ``x`` is zero with ``probability``, else divided by ``1 - probability``.

    The draw is a function of ``seed`` (int64 ``[1]``), ``offset`` and the element's index alone; ``mask`` is uint8 of ``x``'s shape.
    """
    y, mask = tex.prim.dropout(x.data, probability, seed.data, offset)
    return cast_checked(Tensor(y, x.type), type), Tensor(mask, DType.Byte)


def ddropout(dy: Tensor, mask: Tensor, probability: float, type: Type) -> Tensor:
    """The gradient of ``dropout``."""
    return cast_checked(Tensor(tex.prim.dropout_backward(dy.data, mask.data, probability), dy.type), type)
