"""MXFP8: FP8 in blocks of 32 with E8M0 scales, powers of two (OCP Microscaling Formats specification 1.0, 2023)."""

from __future__ import annotations

from typing import Any

from fusible.tex.formats.blocks import BlockFormat
from fusible.tex.formats.format import Marks, Scheme
from fusible.tex.protocol import fp8_format

__all__ = ["MXFP8", "MXFP8Format", "MXFP8_SCHEME"]


class MXFP8Format(BlockFormat):
    """Neither copy is transposed; scales ``[M, K / 32]`` and ``[M / 32, K]``, those of a tile repeated for each of its lines."""

    name = "mxfp8"
    marks = Marks(("_with_gemm_swizzled_scales", "_fp8_dtype", "_rowwise_data", "_columnwise_data"), lacks=("_is_2D_scaled", "_fp4_dtype"))
    length = 32
    transposed = False
    blocks_first = True
    scales_are_exponents = True
    gathers = True

    def options(self, quantizer: Any) -> dict[str, Any]:
        return {"fp8_dtype": fp8_format(quantizer.dtype), "with_gemm_swizzled_scales": bool(quantizer.optimize_for_gemm)}


MXFP8: MXFP8Format = MXFP8Format.value()
MXFP8_SCHEME = Scheme(MXFP8.name, MXFP8, Marks(("with_2d_quantization",), lacks=("block_scaling_dim", "row_scaled_nvfp4")))
