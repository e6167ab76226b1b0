"""What the native backend leaves to others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusible import cpp_extensions, tex
from fusible.quantized import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer

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
