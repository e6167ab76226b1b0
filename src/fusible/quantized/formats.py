"""Number formats of 8-bit and 4-bit training: which one the tensors of each direction take, and its largest value."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from fusible.tex import DType
from fusible.tex.protocol import FP8_MAX

__all__ = ["FP8_MAX", "Format"]


class _Largest(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(Enum):
    """The formats of the forward (activations, weights) and the backward direction (gradients).

    ``Format.HYBRID.value.max_fwd`` is the largest value of the forward format; ``forward`` and ``backward`` are the formats themselves.
    """

    E2M1 = _Largest(6.0, 6.0)
    E4M3 = _Largest(448.0, 448.0)
    E5M2 = _Largest(57344.0, 57344.0)
    HYBRID = _Largest(448.0, 57344.0)

    @property
    def forward(self) -> DType:
        return _ELEMENTS[self][0]

    @property
    def backward(self) -> DType:
        return _ELEMENTS[self][1]


_ELEMENTS = {
    Format.E2M1: (DType.kFloat4E2M1, DType.kFloat4E2M1),
    Format.E4M3: (DType.kFloat8E4M3, DType.kFloat8E4M3),
    Format.E5M2: (DType.kFloat8E5M2, DType.kFloat8E5M2),
    Format.HYBRID: (DType.kFloat8E4M3, DType.kFloat8E5M2),
}
