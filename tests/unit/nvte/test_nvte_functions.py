"""The functions that no op uses yet but users may: casts that transpose, allocation, and what a type is called."""

from __future__ import annotations

import pytest
import torch

from fusible import nvte
from fusible.errors import ArgumentError, DTypeError, ShapeError
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
    with pytest.raises(DTypeError, match="element type of 8 or 4 bits"):
        QuantizedType(DType.Float32, "current")
    with pytest.raises(DTypeError, match="'delayed' with a slot"):
        QuantizedType(DType.Float8E4M3, "delayed")
    with pytest.raises(DTypeError, match="fp32, fp16, bf16"):
        nvte.make_nvte_tensor(torch.zeros(1, dtype=torch.int16))
    with pytest.raises(ArgumentError, match="the running pass of cast: expected a scale named '1.x', got none"):
        nvte.cast(nvte.make_nvte_tensor(X), QuantizedType(DType.Float8E4M3, "delayed", "1.x"))
    assert (nvte.dtype_name(DType.BFloat16), nvte.bit_width(DType.Float8E5M2), nvte.bit_width(DType.BFloat16)) == ("BFloat16", 8, 16)
    assert all(nvte.torch_to_te_dtype(nvte.te_to_torch_dtype(dtype)) is dtype for dtype in DType if dtype is not DType.Float4E2M1)
    with pytest.raises(DTypeError, match="te_to_torch_dtype: expected an element type of whole bytes, got e2m1"):
        nvte.te_to_torch_dtype(DType.Float4E2M1)


def test_a_pass_is_seen_by_words_and_ends() -> None:
    state = nvte.Pass("backward", {"1.dy": torch.tensor([2.0])})
    with nvte.running(state):
        assert nvte.pass_() == "backward"
        nvte.cast(nvte.make_nvte_tensor(X), QuantizedType(DType.Float8E5M2, "delayed", "1.dy"))
    assert nvte.pass_() == "inference" and state.amaxes["1.dy"].item() == X.abs().max().item()


def test_interleaving_halves_by_blocks_and_back() -> None:
    x = nvte.make_nvte_tensor(torch.arange(24).view(2, 12).to(torch.float16))
    by_turns = nvte.interleave(x, 3)
    assert by_turns.data[0].tolist() == [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]
    for tensor in (x, nvte.reshape(x, (1, 2, 12)), nvte.reshape(x, (24,))):
        for size in (1, 2, 3, 6):
            assert torch.equal(nvte.deinterleave(nvte.interleave(tensor, size), size).data, tensor.data)
    for function in (nvte.interleave, nvte.deinterleave):
        with pytest.raises(
            ShapeError, match="a tensor that is interleaved in blocks of 5 of (de)?interleave: expected a multiple of 10 columns, got 12"
        ):
            function(x, 5)


@pytest.mark.parametrize("type", [DType.Float32, DType.BFloat16, CURRENT], ids=str)
def test_sums_and_multiples_of_8_bit_tensors_are_those_of_their_values(type: nvte.Type) -> None:
    narrow = nvte.cast(nvte.make_nvte_tensor(X), CURRENT)
    wide = nvte.dequantize(narrow, DType.Float32)
    for one, other in (
        (nvte.add(narrow, narrow, type), nvte.add(wide, wide, type)),
        (nvte.scale(narrow, -0.3, type), nvte.scale(wide, -0.3, type)),
    ):
        assert one.type == other.type == type and torch.equal(values(one), values(other))


def test_the_l2_norm_of_a_row_is_1_and_of_zeros_0() -> None:
    x = nvte.make_nvte_tensor(torch.cat([X, torch.zeros(1, 7)]))
    y, rsigma = nvte.l2norm(x, 1e-6, DType.Float32)
    norms = y.data.double().square().sum(-1)
    # The sum of 7 squares, a root, a product: each to 2^-23; eps takes 1e-6 of a sum that is about 7.
    assert rsigma.shape == (6,) and (norms[:-1] - 1).abs().max() < 1e-6 and norms[-1] == 0
    assert torch.equal(nvte.dl2norm(y, nvte.make_nvte_tensor(torch.zeros(6, 7)), rsigma, DType.Float32).data.isfinite(), torch.ones(6, 7).bool())
    assert nvte.l2norm(nvte.make_nvte_tensor(torch.zeros(3, 0)), 1e-6, DType.Float32)[0].shape == (3, 0)
