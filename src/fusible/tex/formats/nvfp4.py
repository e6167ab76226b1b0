"""NVFP4: E2M1 in blocks of 16 with E4M3 scales, and an fp32 amax for the tensor or for each of its lines (NVIDIA 2025, arXiv:2509.25149)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.tex.enums import DType
from fusible.tex.formats.blocks import WAYS, BlockFormat
from fusible.tex.formats.format import Marks, Scheme
from fusible.tex.protocol import QuantizerLike, outer, to_dtype

__all__ = ["NVFP4", "NVFP4Format", "NVFP4QuantizerLike", "NVFP4_OPTIONS", "NVFP4_SCHEME"]

NVFP4_OPTIONS = ("row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max")
"""The options of a quantizer that its tensors repeat."""


class NVFP4QuantizerLike(QuantizerLike, Protocol):
    """The options of an NVFP4 quantizer, ours or NVIDIA's; ``quantized.NVFP4Quantizer`` says what each does."""

    with_amax_reduction: bool
    with_rht: bool
    rht_matrix: Any
    with_2d_quantization: bool
    stochastic_rounding: bool
    row_scaled_nvfp4: bool
    nvfp4_use_4over6: bool
    nvfp4_e4m3_max: int
    nvfp4_4over6_err_mode: str


class NVFP4Format(BlockFormat):
    """The column-wise copy is that of the transposed tensor, packed along its last dimension; scales ``[M, K / 16]`` and ``[K, M / 16]``."""

    name = "nvfp4"
    marks = Marks(("_fp4_dtype", "_rowwise_data", "_columnwise_data"))
    length = 16
    packed = 2
    buffers = (*BlockFormat.buffers, "amax_rowwise", "amax_columnwise")
    member_fields: ClassVar[Mapping[str, str]] = {**BlockFormat.member_fields, "amax": "_amax_rowwise", "columnwise_amax": "_amax_columnwise"}
    scale_fields = ("amax_rowwise", "amax_columnwise")

    def element(self, x: Any) -> Any:
        return x._fp4_dtype

    def buffer_specs(self, quantizer: Any, shape: Sequence[int], rowwise: bool, columnwise: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        specs = super().buffer_specs(quantizer, shape, rowwise, columnwise)
        for way, asked, lines in zip(WAYS, (rowwise, columnwise), (outer(shape), shape[-1]), strict=True):
            if asked:
                specs[f"amax_{way}"] = (lines if quantizer.row_scaled_nvfp4 else 1,), torch.float32
        return specs

    def options(self, quantizer: Any) -> dict[str, Any]:
        swizzled = {"with_gemm_swizzled_scales": bool(quantizer.optimize_for_gemm)}
        return {"fp4_dtype": DType.kFloat4E2M1, **swizzled, **{option: getattr(quantizer, option) for option in NVFP4_OPTIONS}}

    def check_quantizer(self, quantizer: Any) -> None:
        of = "an NVFP4 quantizer"
        if to_dtype(quantizer.dtype) != DType.kFloat4E2M1:
            raise DTypeError(expected("kFloat4E2M1", of=of, got=repr(quantizer.dtype), do="pass that type"))
        if quantizer.row_scaled_nvfp4 and quantizer.with_2d_quantization:
            raise ArgumentError(expected("16x1 blocks with an amax per row", of=of, got="16x16 tiles", do="choose one of the two"))
        if quantizer.nvfp4_use_4over6:
            for option in ("with_rht", "stochastic_rounding"):
                if getattr(quantizer, option):
                    raise ArgumentError(expected(f"no {option} beside 4-over-6", of=of, got="both", do="choose one of the two"))
            if quantizer.nvfp4_e4m3_max not in (448, 256) or quantizer.nvfp4_4over6_err_mode not in ("MAE", "MSE"):
                got = f"{quantizer.nvfp4_e4m3_max} and {quantizer.nvfp4_4over6_err_mode!r}"
                raise ArgumentError(expected("an E4M3 bound of 448 or 256, and MAE or MSE", of=of, got=got, do="pass one of each"))
        if quantizer.with_rht and not quantizer.with_post_rht_amax:
            raise ArgumentError(expected("with_post_rht_amax beside with_rht", of=of, got="only with_rht", do="set both"))


NVFP4: NVFP4Format = NVFP4Format.value()
NVFP4_SCHEME = Scheme(NVFP4.name, NVFP4, Marks(("row_scaled_nvfp4",)))
