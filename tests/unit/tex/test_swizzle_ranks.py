"""Scales that are put in the order of tensor cores afterwards are those of a tensor that was quantized in that order, of whatever rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusible import tex
from fusible.quantized import MXFP8Quantizer, NVFP4Quantizer
from fusible.tex import DType

_SHAPES = ((128, 64), (2, 64, 128), (4, 2, 16, 96), (3, 64, 32))


@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize("make", [lambda: MXFP8Quantizer(DType.kFloat8E4M3), NVFP4Quantizer], ids=["mxfp8", "nvfp4"])
def test_scales_swizzled_afterwards_are_those_of_a_tensor_quantized_so(make: Any, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    wanted, plain = make(), make()
    wanted.optimize_for_gemm = True
    with tex.set_backend("torch"):
        done, later = tex.quantize(x, wanted), tex.quantize(x, plain)
        assert not later._with_gemm_swizzled_scales
        tex.swizzle_scales_for_gemm_(later)
    for way in ("rowwise", "columnwise"):
        assert torch.equal(getattr(later, f"_{way}_scale_inv"), getattr(done, f"_{way}_scale_inv")), way
