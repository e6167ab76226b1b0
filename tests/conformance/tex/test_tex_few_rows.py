"""Products of plain values with a weight in blocks, by the compiled kernels beside the values that it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from native_calls import native

from fusible import cpp_extensions, tex
from fusible.quantized import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from fusible.tex import DType
from fusible.tex.backends.cpu import gemm

pytestmark = pytest.mark.skipif(not cpp_extensions.available, reason="no compiled kernels")

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
QUANTIZERS: dict[str, Any] = {
    "mxfp8": lambda: MXFP8Quantizer(E4M3),
    "mxfp8 e5m2": lambda: MXFP8Quantizer(E5M2),
    "rows": lambda: Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    "rows, any scales": lambda: Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1, force_pow_2_scales=False),
    "squares": lambda: Float8BlockQuantizer(E5M2, rowwise=True, columnwise=True, block_scaling_dim=2),
    "nvfp4": lambda: NVFP4Quantizer(),
    "nvfp4 squares": lambda: NVFP4Quantizer(with_2d_quantization=True),
}


def weight(name: str, swizzled: bool) -> Any:
    quantizer = QUANTIZERS[name]()
    if swizzled:
        quantizer.optimize_for_gemm = True
    values = torch.randn(288, 416, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 416)
    return native(tex.quantize, values, quantizer)


def of_copy(held: Any, along_rows: bool) -> torch.Tensor:
    held.update_usage(rowwise_usage=along_rows, columnwise_usage=not along_rows)
    values: torch.Tensor = held.dequantize(dtype=torch.float32)
    return values.double()


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("along_rows", [True, False])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_rows_are_multiplied_with_the_values_of_a_copy(name: str, along_rows: bool, swizzled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In either direction, whether scales lie in the order of their blocks or in that of NVIDIA's products."""
    taken: list[bool] = []
    codes = gemm._codes
    monkeypatch.setattr(gemm, "_codes", lambda *args: taken.append((found := codes(*args)) is not None) or found)
    held = weight(name, swizzled)
    depth = 416 if along_rows else 288
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 2, 7, 24, 25, 32, 33):
            x = torch.randn(rows, depth, generator=torch.Generator().manual_seed(1)).to(dtype)
            rest = (None, None, DType.kFloat32, None, None, False, None, False, None, 0, False, False)
            got = native(tex.generic_gemm, held, along_rows, x, False, *rest)[0]
            one = of_copy(weight(name, False), along_rows)
            values = one.t() if along_rows else one
            size = x.double().abs() @ values.abs()
            allowed = (depth + 4) * torch.finfo(torch.float32).eps * size
            assert bool(((got.double() - x.double() @ values).abs() <= allowed).all())
    assert taken == [False, True] * 14  # x is not, and the weight is
