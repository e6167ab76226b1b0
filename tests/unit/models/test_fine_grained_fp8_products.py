"""The products of FP8 weights as transformers' modules hold them, against formulas in float64 with the casts of ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from fusible.errors import NotServedError
from fusible.models.fine_grained_fp8.products import batched_product, grouped_product, product
from fusible.models.fine_grained_fp8.weights import quantized_weight
from fusible.quantized import Float8BlockwiseQTensor, Float8Tensor, MXFP8Tensor

ONE_SCALE = None
FORMS: dict[str, tuple[tuple[int, int] | None, tuple[int, int], bool, type]] = {
    "tiles": ((128, 128), (256, 384), False, Float8BlockwiseQTensor),
    "tiles, the last a part": ((128, 128), (200, 300), False, Float8BlockwiseQTensor),
    "less than a tile": ((128, 128), (64, 96), True, Float8Tensor),
    "tiles of powers": ((128, 128), (256, 384), True, Float8BlockwiseQTensor),
    "wide blocks": ((64, 256), (160, 500), False, Float8BlockwiseQTensor),
    "rows": ((1, 300), (100, 300), False, Float8BlockwiseQTensor),
    "short blocks": ((1, 32), (96, 160), True, MXFP8Tensor),
    "short blocks of rows": ((4, 32), (96, 160), True, MXFP8Tensor),
    "one scale": (ONE_SCALE, (96, 160), False, Float8Tensor),
}
EACH = pytest.mark.parametrize("form", FORMS)


def made(form: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight, scales, and the weight's values in float64."""
    block, (rows, columns), powers, _ = FORMS[form]
    draw = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, columns, generator=draw) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    if block is None:
        scale = torch.rand((), generator=draw) + 0.5
        return weight, scale, weight.double() * scale.double()
    scale = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=draw) + 0.5
    if powers:
        scale = torch.exp2(torch.randint(-6, 6, scale.shape, generator=draw).float()).to(torch.float8_e8m0fnu)
    whole = scale.double().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight, scale, weight.double() * whole


def near(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Sums of K terms in fp32, and products with scales that are rounded."""
    wanted, size = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    assert bool(((found.double() - wanted).abs() <= (weight.shape[1] ** 0.5 + 4) * 2.0**-23 * size).all())


@EACH
def test_the_tensor_has_the_bytes_and_the_values(form: str) -> None:
    weight, scale, values = made(form)
    held = quantized_weight(weight, scale, FORMS[form][0], torch.bfloat16)
    assert type(held) is FORMS[form][3]
    torch.testing.assert_close(held.dequantize(dtype=torch.float32).double(), values, rtol=2.0**-23, atol=0)
    data = held._data if isinstance(held, Float8Tensor) else held._rowwise_data  # pyright: ignore[reportAttributeAccessIssue]
    assert data is not None and data.data_ptr() == weight.data_ptr()


@EACH
@pytest.mark.parametrize("rows", [0, 1, 5, 64])
def test_activations_as_they_are(form: str, rows: int) -> None:
    weight, scale, values = made(form)
    x = torch.randn(2, rows, weight.shape[1], generator=torch.Generator().manual_seed(1))
    y = product(x, weight, scale, FORMS[form][0], quantize=False)
    assert y.shape == (2, rows, len(weight)) and y.dtype is torch.float32
    near(y, x, values)


def in_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounded by ml_dtypes, saturated."""
    rounded = np.clip(x.numpy(), -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return torch.from_numpy(rounded)


def grouped_amax(x: torch.Tensor, length: int) -> torch.Tensor:
    """For each element the largest magnitude of its ``length`` in a row."""
    columns = x.shape[-1]
    filled = torch.nn.functional.pad(x, (0, -columns % length))
    return filled.view(*x.shape[:-1], -1, length).abs().amax(-1).repeat_interleave(length, -1)[..., :columns]


@EACH
@pytest.mark.parametrize("rows", [1, 6, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_by_their_own_magnitudes(form: str, rows: int, dtype: torch.dtype) -> None:
    """x has the largest magnitude 448 in each block, so that its scale is a power of two, and quantizing is one rounding."""
    weight, scale, values = made(form)
    x = (torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(2)) * 60).clamp(-400, 400)
    x[:, ::32] = 448.0
    x = (x * torch.exp2(torch.arange(rows).float() % 5)[:, None]).to(dtype)
    length = {MXFP8Tensor: 32, Float8BlockwiseQTensor: 128, Float8Tensor: x.shape[1]}[FORMS[form][3]]
    factor = (grouped_amax(x.float(), length) / 448).double()
    y = product(x, weight, scale, FORMS[form][0], torch.float32)
    taken = in_e4m3(x.double() / factor) * factor
    assert not torch.equal(taken, x.double())
    near(y, taken, values)


@EACH
def test_activations_by_a_given_scale(form: str) -> None:
    weight, scale, values = made(form)
    x = torch.randn(2, 3, weight.shape[1], generator=torch.Generator().manual_seed(3)) * 60
    x[0, 0, 0] = 1000.0  # saturates
    y = product(x, weight, scale, FORMS[form][0], activation_scale=torch.tensor(0.5))
    near(y, in_e4m3(x.double() / 0.5) * 0.5, values)


@EACH
def test_half_precision_is_rounded_once(form: str) -> None:
    weight, scale, _ = made(form)
    x = torch.randn(7, weight.shape[1], generator=torch.Generator().manual_seed(4)).bfloat16()
    for quantize in (True, False):
        exact = product(x, weight, scale, FORMS[form][0], torch.float32, quantize=quantize)
        torch.testing.assert_close(product(x, weight, scale, FORMS[form][0], quantize=quantize).float(), exact, rtol=2.0**-8, atol=2.0**-8)


@EACH
@pytest.mark.parametrize("quantize", [False, True])
def test_of_many_rows_values_are_rounded_no_more_than_those_of_the_dequantized_model(form: str, quantize: bool) -> None:
    weight, scale, values = made(form)
    x = torch.randn(64, weight.shape[1], generator=torch.Generator().manual_seed(6)).bfloat16()
    found = product(x, weight, scale, FORMS[form][0], quantize=quantize)
    exact = product(x, weight, scale, FORMS[form][0], torch.float32, quantize=quantize).double()
    assert found.dtype is torch.bfloat16
    # A rounding of the weight, one of x where it is quantized, and one of y. Of x a sixteenth more is there when it is quantized.
    size = x.double().abs() @ values.abs().T * 1.07
    assert bool(((found.double() - exact).abs() <= 2.02 * 2.0**-9 * size + 2.0**-9 * exact.abs() + 2.0**-20 * size).all())


def test_experts_are_products_of_their_tokens() -> None:
    parts = [made("tiles", seed) for seed in range(3)]
    weight, scale = (torch.stack([part[i] for part in parts]) for i in (0, 1))
    x = torch.randn(8, 384, generator=torch.Generator().manual_seed(5))
    grouped = grouped_product(x, weight, scale, [3, 0, 4], (128, 128), quantize=False)
    near(grouped[:3], x[:3], parts[0][2])
    near(grouped[3:7], x[3:7], parts[2][2])
    assert not grouped[7].any()
    chosen = torch.tensor([2, 0, 1, 2, 3, 0, 0, 1])
    batched = batched_product(x, weight, scale, chosen, (128, 128), quantize=False)
    for place, expert in enumerate(chosen.tolist()):
        if expert < 3:
            near(batched[place : place + 1], x[place : place + 1], parts[expert][2])
    assert not batched[4].any()


def test_fewer_rows_than_a_block_have_a_scale_for_each_half() -> None:
    """As transformers keeps the gate and the projection of narrow experts in one matrix."""
    weight = torch.randn(96, 256).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 2.0], [4.0, 0.25]])
    held = quantized_weight(weight, scale, (128, 128), torch.float32)
    whole = scale.repeat_interleave(48, 0).repeat_interleave(128, 1)
    assert torch.equal(held.dequantize(dtype=torch.float32), weight.float() * whole)


REFUSED: dict[str, tuple[torch.Tensor, torch.Tensor, tuple[int, int]]] = {
    "int8": (torch.zeros(64, 64, dtype=torch.int8), torch.ones(64, 4), (1, 32)),
    r"blocks of 64x64 with scales of float32": (torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.ones(2, 2), (64, 64)),
    r"blocks of 1x32 with scales of float32": (torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.ones(128, 4), (1, 32)),
    r"50 rows, which": (torch.zeros(50, 128).to(torch.float8_e4m3fn), torch.ones(50, 4).to(torch.float8_e8m0fnu), (1, 32)),
    r"scales \[3, 2\]": (torch.zeros(128, 256).to(torch.float8_e4m3fn), torch.ones(3, 2), (128, 128)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_no_tensor_has_is_refused(why: str) -> None:
    weight, scale, block = REFUSED[why]
    with pytest.raises(NotServedError, match=rf"^an FP8 weight \[.*\]: expected E4M3 in blocks .*, got {why}.*; .*dequantize=True"):
        product(torch.zeros(2, weight.shape[1]), weight, scale, block)


def test_a_graph_of_torch_compile_has_the_product_whole() -> None:
    weight, scale, _ = made("tiles")
    x = torch.randn(4, 384)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return product(x * 2, weight, scale, (128, 128))

    compiled = torch.compile(doubled, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), doubled(x))
    one, other = (x.clone().requires_grad_() for _ in range(2))
    compiled(one).square().sum().backward()
    doubled(other).square().sum().backward()
    assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


@EACH
def test_x_has_the_gradient_of_the_values(form: str) -> None:
    weight, scale, values = made(form)
    x = torch.randn(2, 3, weight.shape[1], requires_grad=True)
    dy = torch.randn(2, 3, len(weight))
    product(x, weight, scale, FORMS[form][0]).backward(dy)
    assert x.grad is not None
    near(x.grad, dy, values.T)
