"""MXFP4, a number format that a package outside of the source tree brings (``examples/mxfp4``), against ``ml_dtypes`` and float64.

Its five files are all there is to it: a quantizer, tensors that can be saved, products, grouped tensors and training, eager and compiled, follow.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from doc_pages import ROOT
from torch import Tensor

import fusible
from fusible import nvte, quantized, tex
from fusible.errors import DTypeError, ShapeError
from fusible.nvte import DType, QuantizedType

WAYS = ("rowwise", "columnwise")
LENGTH = 32


@pytest.fixture(scope="module")
def mxfp4() -> Iterator[Any]:
    sources = sorted((ROOT / "src").rglob("*.py"))
    before = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).digest()
    sys.path.insert(0, str(ROOT / "examples"))
    yield importlib.import_module("mxfp4")
    sys.path.remove(str(ROOT / "examples"))
    assert hashlib.sha256(b"".join(path.read_bytes() for path in sources)).digest() == before


def numbers(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Of sizes that differ from block to block, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp2(torch.randint(-40, 40, (rows, columns // LENGTH), generator=generator).float()).repeat_interleave(LENGTH, 1)
    x[0, :LENGTH] = 0.0
    return x


def oracle(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and float64 values of the blocks along rows: ``ml_dtypes`` rounds and has the numbers of both formats."""
    blocks = x.astype(np.float64).reshape(x.shape[0], -1, LENGTH)
    amax = np.abs(blocks).max(2)
    with np.errstate(divide="ignore"):
        exponent = np.where(amax > 0, np.floor(np.log2(amax)) - 2, -127).clip(-127, 127)
    scale = np.exp2(exponent).astype(ml_dtypes.float8_e8m0fnu)
    elements = np.clip(blocks / scale.astype(np.float64)[:, :, None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    values = elements.astype(np.float64) * scale.astype(np.float64)[:, :, None]
    return elements.view(np.uint8).reshape(x.shape) & 0xF, scale.view(np.uint8), values.reshape(x.shape)


def on_lazy(quantizer: Any, x: Tensor) -> Any:
    """``quantize`` on lazy tensors, the buffers read back as torch's."""
    from fusible import lazy

    held = tex.quantize(lazy.Tensor(x.numpy()), quantizer, None, None)
    fields = {name: None if part is None else torch.from_numpy(part.numpy()) for name, part in buffers(held).items()}
    return SimpleNamespace(**fields), torch.from_numpy(tex.dequantize(held, torch.float32).numpy())


def buffers(x: Any) -> dict[str, Any]:
    return {name: getattr(x, name) for name in (f"_{way}_{part}" for way in WAYS for part in ("data", "scale_inv"))}


@pytest.mark.parametrize("framework", ["torch", "lazy"])
def test_every_byte_is_the_one_of_ml_dtypes(mxfp4: Any, framework: str) -> None:
    if framework == "lazy":
        pytest.importorskip("jaxlib")
    x, quantizer = numbers(64, 96), mxfp4.MXFP4Quantizer()
    if framework == "torch":
        held = quantizer(x)
        assert type(held) is mxfp4.MXFP4Tensor and held.shape == x.shape
        dequantized = held.dequantize()
    else:
        quantizer.internal = True
        held, dequantized = on_lazy(quantizer, x)
    for way, lines in zip(WAYS, (x.numpy(), x.numpy().T), strict=True):
        codes, scales, values = oracle(lines)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        got = getattr(held, f"_{way}_scale_inv")
        assert np.array_equal(getattr(held, f"_{way}_data").numpy().reshape(packed.shape), packed)
        assert got.shape == (128, 4) and np.array_equal(got[: lines.shape[0], : scales.shape[1]].numpy(), scales)
        if way == "rowwise":
            assert np.array_equal(dequantized.double().numpy(), values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_block_without_a_scale_is_nan(mxfp4: Any, bad: float) -> None:
    x = numbers(32, 64)
    x[3, 40] = bad
    held = mxfp4.MXFP4Quantizer(columnwise=False)(x)
    assert held.dequantize().isnan().sum() == LENGTH and held.dequantize()[3, 32:].isnan().all()


def test_blocks_that_are_not_whole_are_refused_in_a_sentence(mxfp4: Any) -> None:
    with pytest.raises(ShapeError, match=r"^a tensor to quantize to MXFP4: expected rows and columns in multiples of 32, got \[64, 80\]; pad it"):
        mxfp4.MXFP4Quantizer()(torch.ones(64, 80))


@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_products_are_those_of_the_values(mxfp4: Any, layout: str) -> None:
    """To the rounding of the fp32 sums: the operands' values are exact."""
    a, b = numbers(96, 64, seed=1).clamp(-8, 8), numbers(32, 64, seed=2).clamp(-8, 8)
    if layout != "TN":
        a = a.t().contiguous()
    if layout == "NT":
        b = b.t().contiguous()
    transa, transb = layout[0] == "T", layout[1] == "T"
    quantizer = mxfp4.MXFP4Quantizer()
    exact_a = oracle(a.numpy())[2] if transa else oracle(a.numpy().T)[2].T
    exact_b = oracle(b.numpy().T)[2].T if transb else oracle(b.numpy())[2]
    wanted = (exact_b.T if transb else exact_b) @ (exact_a.T if transa else exact_a)
    dtype = tex.DType.kFloat32
    got = tex.generic_gemm(quantizer(a), transa, quantizer(b), transb, None, None, dtype, None, dtype, False, None, False, None, 0, False, False)[0]
    scale = np.abs(exact_b.T if transb else exact_b) @ np.abs(exact_a.T if transa else exact_a)
    assert (np.abs(got.double().numpy() - wanted) <= 64 * torch.finfo(torch.float32).eps * scale).all()


def recipe_of(mxfp4: Any) -> fusible.CustomRecipe:
    return fusible.CustomRecipe(qfactory=lambda role: mxfp4.MXFP4Quantizer() if role.tensor_type in ("input", "weight", "grad_output") else None)


def steps(mxfp4: Any, executor: str) -> tuple[list[float], list[Tensor]]:
    """The losses of three steps of training, and the gradients of the first."""
    torch.manual_seed(1)
    model = fusible.Sequential(fusible.Linear(96, 64), fusible.GELU(), fusible.Linear(64, 32)).compile(executor)
    x, recipe = torch.randn(64, 96).bfloat16(), recipe_of(mxfp4)
    optimizer, losses, first = torch.optim.SGD(model.parameters(), lr=0.2), [], []
    for step in range(3):
        with fusible.autocast(recipe=recipe):
            loss = (model(x).float() - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            first = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
    return losses, first


def test_a_model_trains_in_it_eager_and_compiled(mxfp4: Any) -> None:
    pytest.importorskip("jaxlib")
    eager, gradients = steps(mxfp4, "eager")
    compiled, others = steps(mxfp4, "xla")
    assert eager[2] < eager[1] < eager[0]
    # bf16 values on either side of a tie become neighbours in E2M1, at most 1/3 apart; over a batch of 64 rows few of them do.
    assert compiled == pytest.approx(eager, rel=0.02)
    for a, b in zip(gradients, others, strict=True):
        assert (a - b).norm() <= 0.05 * a.norm()


def test_gradients_are_those_of_the_quantized_operands(mxfp4: Any) -> None:
    """Of one linear layer, all three products, against float64 on the values that the operands have in each direction."""
    torch.manual_seed(3)
    layer, x, dy = fusible.Linear(96, 64, bias=False), torch.randn(32, 96, requires_grad=True), torch.randn(32, 64)
    with fusible.autocast(recipe=recipe_of(mxfp4)):
        y = fusible.Sequential(layer)(x)
    y.backward(dy)
    held = {name: t.detach().numpy() for name, t in (("x", x), ("w", layer.weight), ("dy", dy))}
    rows = {name: oracle(t)[2] for name, t in held.items()}
    columns = {name: oracle(t.T)[2].T for name, t in held.items()}
    for got, left, right in (
        (y, rows["x"], rows["w"].T),
        (x.grad, rows["dy"], columns["w"]),
        (layer.weight.grad, columns["dy"].T, columns["x"]),
    ):
        error = np.abs(got.detach().double().numpy() - left @ right)
        assert (error <= left.shape[1] * torch.finfo(torch.float32).eps * (np.abs(left) @ np.abs(right))).all()


def test_a_scheme_that_nobody_brings_is_refused() -> None:
    with pytest.raises(DTypeError, match="^the scaling of a QuantizedType: expected a scheme that there is, got 'mxfp9'; name one"):
        QuantizedType(DType.Float8E4M3, "mxfp9", quantizer=quantized.MXFP8Quantizer(tex.DType.kFloat8E4M3))


def test_its_tensors_are_described_saved_padded_and_rescaled(mxfp4: Any) -> None:
    type = QuantizedType.of(mxfp4.MXFP4Quantizer())
    assert str(type) == "e2m1[mxfp4, both ways]" and type.blocks is mxfp4.MXFP4
    x = nvte.make_nvte_tensor(torch.randn(33, 40))
    held = nvte.cast(x, type)
    assert held.shape == (33, 40)
    doubled = nvte.rescale(held, 1)
    assert torch.equal(nvte.dequantize(doubled, DType.Float32).data, 2 * nvte.dequantize(held, DType.Float32).data)
    whole = mxfp4.MXFP4Quantizer()(torch.randn(64, 64))
    again = quantized.unflatten_state_dict(*quantized.flatten_state_dict({"w": whole}))["w"]
    assert isinstance(again, mxfp4.MXFP4Tensor) and torch.equal(again.dequantize(), whole.dequantize())
    assert type_of(again) == type_of(whole)


def type_of(x: Any) -> Any:
    return {name: None if part is None else part.tolist() for name, part in buffers(x).items()}
