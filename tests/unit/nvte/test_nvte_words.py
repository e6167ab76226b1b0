"""The words that no op uses yet but users may: casts that transpose, allocation, and what a type is called."""

from __future__ import annotations

import pytest
import torch

from fusible import nvte
from fusible.errors import ArgumentError, DTypeError
from fusible.nvte import DType, QuantizedType

CURRENT = QuantizedType(DType.Float8E4M3, "current")
X = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))


def values(x: nvte.Tensor) -> torch.Tensor:
    return nvte.dequantize(x, DType.Float32).data if nvte.is_fp8(x) else x.data


def test_cast_transpose_gives_both_from_one_read() -> None:
    y, transposed = nvte.cast_transpose(nvte.make_nvte_tensor(X), CURRENT)
    assert y.shape == (5, 7) and transposed.shape == (7, 5) and y.type == transposed.type == CURRENT
    assert torch.equal(values(y).T, values(transposed)) and torch.equal(values(nvte.transpose(y)), values(transposed))
    again, back = nvte.cast_transpose_checked(y, CURRENT)
    assert again is y and torch.equal(values(back), values(transposed))
    (pair,) = nvte.multi_cast_transpose([nvte.make_nvte_tensor(X)], [DType.BFloat16])
    assert [t.dtype for t in pair] == [DType.BFloat16] * 2 and torch.equal(pair[0].data.T, pair[1].data)
    assert nvte.multi_cast_transpose_checked([y], [CURRENT])[0][0] is y


@pytest.mark.parametrize("type", [CURRENT, DType.Float32], ids=str)
def test_transposed_gradients_of_activations(type: nvte.Type) -> None:
    dy, x = nvte.make_nvte_tensor(X), nvte.make_nvte_tensor(X * 2)
    dx, transposed, dbias = nvte.cast_transpose_dbias_dgelu_checked(dy, x, type, DType.Float32)
    expected, expected_dbias = nvte.dbias_dgelu(dy, x, type, DType.Float32)
    assert torch.equal(values(dx), values(expected)) and torch.equal(values(transposed), values(expected).T)
    assert torch.equal(dbias.data, expected_dbias.data)
    gated = nvte.make_nvte_tensor(torch.cat([X, X * 3], dim=1))
    dx, transposed = nvte.cast_transpose_dgeglu_checked(dy, gated, type)
    assert dx.shape == (5, 14) and torch.equal(values(transposed), values(dx).T)
    y, transposed, dbias = nvte.cast_transpose_dbias_checked(dy, type, DType.Float32)
    assert torch.equal(values(transposed), values(y).T) and torch.allclose(dbias.data, X.sum(0), atol=7 * 5 * 2**-23)


def test_allocation_follows_type_and_framework() -> None:
    like = nvte.make_nvte_tensor(X)
    assert nvte.empty((2, 3), DType.Float16, like).data.dtype is torch.float16
    quantized = nvte.empty((2, 3), CURRENT, like)
    assert quantized.shape == (2, 3) and nvte.is_fp8(quantized) and nvte.empty_like(quantized).type == CURRENT
    assert [t.shape for t in nvte.multi_empty_share_metadata((2, 3), (3, 2), type=CURRENT, like=like)] == [(2, 3), (3, 2)]


def test_a_tensor_is_immutable_and_copies_like_a_value() -> None:
    import copy

    tensor = nvte.make_nvte_tensor(X)
    with pytest.raises(AttributeError, match="immutable"):
        tensor.data = X
    assert torch.equal(copy.deepcopy(tensor).data, X) and repr(tensor) == "Tensor(fp32, [5, 7])"


def test_types_refuse_what_means_nothing() -> None:
    with pytest.raises(DTypeError, match="8-bit element type"):
        QuantizedType(DType.Float32, "current")
    with pytest.raises(DTypeError, match="'delayed' with a slot"):
        QuantizedType(DType.Float8E4M3, "delayed")
    with pytest.raises(DTypeError, match="fp32, fp16, bf16"):
        nvte.make_nvte_tensor(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ArgumentError, match="a scale named '1.x' of the running pass, got none"):
        nvte.cast(nvte.make_nvte_tensor(X), QuantizedType(DType.Float8E4M3, "delayed", "1.x"))
    assert (nvte.dtype_name(DType.BFloat16), nvte.bit_width(DType.Float8E5M2), nvte.bit_width(DType.BFloat16)) == ("BFloat16", 8, 16)
    assert all(nvte.torch_to_te_dtype(nvte.te_to_torch_dtype(dtype)) is dtype for dtype in DType)


def test_a_pass_is_seen_by_words_and_ends() -> None:
    state = nvte.Pass("backward", {"1.dy": torch.tensor([2.0])})
    with nvte.running(state):
        assert nvte.pass_() == "backward"
        nvte.cast(nvte.make_nvte_tensor(X), QuantizedType(DType.Float8E5M2, "delayed", "1.dy"))
    assert nvte.pass_() == "inference" and state.amaxes["1.dy"].item() == X.abs().max().item()
