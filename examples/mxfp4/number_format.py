"""What a tensor of MXFP4 consists of, whatever computes with it."""

from __future__ import annotations

from typing import Any

from fusible.tex import DType
from fusible.tex.formats import BlockFormat, Scheme

__all__ = ["MXFP4", "MXFP4_SCHEME"]


class MXFP4Format(BlockFormat):
    """Two E2M1 elements to a byte, the even one low; the column-wise copy is that of the transposed tensor. Scales are bytes that stand for powers of
    two, ``[M, K / 32]`` and ``[K, M / 32]``."""

    name = "mxfp4"
    length = 32
    packed = 2
    swizzles = False
    scales_are_exponents = True

    def element(self, x: Any) -> Any:
        return x._fp4_dtype

    def options(self, quantizer: Any) -> dict[str, Any]:
        return {"fp4_dtype": DType.kFloat4E2M1}

    def check_quantizer(self, quantizer: Any) -> None:
        """It has no options."""


MXFP4: MXFP4Format = MXFP4Format.value()
MXFP4_SCHEME = Scheme(MXFP4.name, MXFP4)
