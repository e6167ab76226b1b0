"""Number formats of 8-bit training: which one the tensors of each direction take, and its largest value."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from fusible.tex import DType
from fusible.tex.protocol import FP8_MAX

__all__ = ["FP8_MAX", "Format"]

class _Direction(NamedTuple):
    fwd: float
    bwd: float


class Format(Enum):
    """The formats of the forward (activations, weights) and the backward direction (gradients).

    ``Format.HYBRID.value.fwd`` is the largest value of the forward format; ``forward`` and ``backward`` are the formats themselves.
    """

    E4M3 = _Direction(448.0, 448.0)
    E5M2 = _Direction(57344.0, 57344.0)
    HYBRID = _Direction(448.0, 57344.0)

    @property
    def forward(self) -> DType:
        return DType.kFloat8E5M2 if self is Format.E5M2 else DType.kFloat8E4M3

    @property
    def backward(self) -> DType:
        return DType.kFloat8E4M3 if self is Format.E4M3 else DType.kFloat8E5M2
