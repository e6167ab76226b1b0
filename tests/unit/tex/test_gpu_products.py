"""Products that torch has on GPUs for FP8 operands, here by its kernel of that name for CPUs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fusible import tex
from fusible.quantized import Float8CurrentScalingQuantizer
from fusible.tex.backends.torch_backend import gpu_products
from fusible.tex.enums import DType

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of torch's product, on a CPU that passes for a GPU that multiplies FP8.

    By torch's own loops: where the CPU has AMX, torch asks oneDNN for the product of two equal formats, and oneDNN has none where it is held to a
    level below (``make test-level``).
    """
    calls: list[dict[str, Any]] = []
    product = gpu_products._scaled_mm

    def noted(b: torch.Tensor, a: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append({"a": a, "b": b, **options})
        return product(b, a, **options)

    monkeypatch.setattr(gpu_products, "_multiplies_fp8", lambda device: True)
    monkeypatch.setattr(gpu_products, "_scaled_mm", noted)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    return calls


def quantized(shape: tuple[int, int], dtype: DType, rowwise: bool, columnwise: bool) -> Any:
    quantizer = Float8CurrentScalingQuantizer(dtype, torch.device("cpu"), rowwise=rowwise, columnwise=columnwise)
    return tex.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))), quantizer)


def product(a: Any, trans_a: bool, b: Any, trans_b: bool, bias: torch.Tensor | None = None, dtype: DType = DType.kFloat32, gelu: bool = False) -> Any:
    with tex.set_backend("torch", strict=True):
        return tex.generic_gemm(a, trans_a, b, trans_b, None, None, dtype, bias, DType.kBFloat16, gelu, None, False, None, 0, False, True)[0]


def exactly(x: Any, transpose: bool) -> torch.Tensor:
    value = tex.dequantize(x, DType.kFloat32).double()
    return value.t() if transpose else value


@pytest.mark.parametrize(("trans_a", "trans_b"), list(itertools.product((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize("copies", [(True, False), (False, True), (True, True)], ids=["rows", "columns", "both"])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=["e4m3", "of-e5m2", "e5m2"])
def test_of_any_layout_and_copies(
    trans_a: bool, trans_b: bool, copies: tuple[bool, bool], dtypes: tuple[DType, DType], served: list[dict[str, Any]]
) -> None:
    a = quantized((48, 32) if trans_a else (32, 48), dtypes[0], *copies)
    b = quantized((32, 64) if trans_b else (64, 32), dtypes[1], *copies)
    with tex.set_backend("torch"):
        wanted = exactly(b, trans_b) @ exactly(a, trans_a)
    got = product(a, trans_a, b, trans_b)
    assert len(served) == 1
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=32 * 2**-23 * wanted.abs().max().item())


def test_a_bias_and_the_rounding_are_the_products_own(served: list[dict[str, Any]]) -> None:
    a, b, bias = quantized((48, 32), E4M3, True, False), quantized((64, 32), E4M3, True, False), torch.arange(48.0).bfloat16()
    got = product(a, True, b, False, bias, dtype=DType.kBFloat16)
    assert [(call["out_dtype"], call["bias"] is bias) for call in served] == [(torch.bfloat16, True)]
    wanted = exactly(b, False) @ exactly(a, True) + bias.double()
    torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=2**-8)


def test_a_gelu_reads_sums_in_fp32(served: list[dict[str, Any]]) -> None:
    a, b = quantized((48, 32), E4M3, True, False), quantized((64, 32), E4M3, True, False)
    got = product(a, True, b, False, dtype=DType.kBFloat16, gelu=True)
    assert [call["out_dtype"] for call in served] == [torch.float32]
    wanted = torch.nn.functional.gelu(exactly(b, False) @ exactly(a, True), approximate="tanh")
    torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=2**-8)


def test_a_scale_is_read_where_16_bytes_begin(served: list[dict[str, Any]]) -> None:
    a, b = quantized((48, 32), E4M3, True, False), quantized((64, 32), E4M3, True, False)
    wanted = product(a, True, b, False)
    for x in (a, b):
        x._scale_inv = torch.cat([torch.zeros(1), x._scale_inv])[1:]
        assert x._scale_inv.data_ptr() % 16
    assert torch.equal(product(a, True, b, False), wanted)
    assert not any(served[-1][name].data_ptr() % 16 for name in ("scale_a", "scale_b"))


@pytest.mark.parametrize(
    ("a", "b"),
    [((24, 32), (64, 32)), ((48, 32), (24, 32)), ((48, 24), (64, 24))],
    ids=["columns", "rows", "depth"],
)
def test_what_has_no_whole_vectors_is_decoded(a: tuple[int, int], b: tuple[int, int], served: list[dict[str, Any]]) -> None:
    A, B = quantized(a, E4M3, True, False), quantized(b, E4M3, True, False)
    wanted = exactly(B, False) @ exactly(A, True)
    got = product(A, True, B, False)
    assert not served
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=32 * 2**-23 * wanted.abs().max().item())


def test_two_of_e5m2_are_decoded(served: list[dict[str, Any]]) -> None:
    A, B = quantized((48, 32), E5M2, True, False), quantized((64, 32), E5M2, True, False)
    product(A, True, B, False)
    assert not served


def test_an_operand_outside_the_gpu_has_no_half_precision_there() -> None:
    assert gpu_products.half_of(torch.zeros(2, 2, dtype=torch.bfloat16)) is None
    assert gpu_products.half_of(quantized((16, 16), E4M3, True, False)) is None
