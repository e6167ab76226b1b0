"""What the native backend leaves to others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusible import cpp_extensions, tex
from fusible.quantized import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from fusible.tex.backends.cpu import gemm as products

pytestmark = pytest.mark.skipif(not cpp_extensions.available, reason="the native kernels are not built")


E4M3 = tex.DType.kFloat8E4M3


@pytest.mark.parametrize("quantizer", [Float8BlockQuantizer(E4M3), MXFP8Quantizer(E4M3), NVFP4Quantizer()], ids=repr)
def test_producers_hand_wide_floats_on_to_who_quantizes_in_blocks(quantizer: Any) -> None:
    x, weight = torch.randn(32, 64).bfloat16(), torch.ones(64, dtype=torch.bfloat16)
    with tex.record() as calls:
        tex.gelu(x, quantizer)
        tex.rmsnorm_fwd(x, weight, 1e-5, None, quantizer, torch.bfloat16, 0, False)
    served = [(call.function, call.backend) for call in calls]
    assert served == [("gelu", "cpu"), ("quantize", "cpu"), ("rmsnorm_fwd", "cpu"), ("quantize", "cpu")]


def test_who_listens_hears_one_call() -> None:
    heard: list[Any] = []
    with tex.listening(heard.append):
        y = tex.gelu(torch.randn(32, 64), MXFP8Quantizer(E4M3))
    assert len(heard) == 1 and heard[0].result is y


@pytest.mark.parametrize("level", ["amx", "avx512bf16", "avx2", "generic"])
def test_a_product_of_bfloat16_that_is_added_to_a_residual_is_nobodys_fp32_product(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has a kernel for ``op(B) @ op(A)`` alone, where there is one: with what it is added to in bf16 it would read both operands as fp32, in
    six times the time."""
    monkeypatch.setattr(cpp_extensions, "get_level", lambda: level)
    a, b, residual = (torch.randn(32, 32).bfloat16() for _ in range(3))
    handed_over: list[Any] = []
    monkeypatch.setattr(products, "_of_next", lambda backend: handed_over.append(backend) or products.successor("generic_gemm", backend))
    with tex.set_backend("cpu"):
        for D, accumulate in ((residual, True), (torch.randn(32, 32), True), (None, False)):
            tex.generic_gemm(a, True, b, False, D, None, None, None, None, False, None, False, None, 0, accumulate, False)
            assert bool(handed_over) is (level == "generic")
            handed_over.clear()
