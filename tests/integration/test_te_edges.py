"""What users of NVIDIA's Python package meet at the edges: training after inference, and tensors without a dimension or an element."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from te_client import EPSILON_OF_QUANTIZER, QUANTIZERS, RECIPES_OF_CLIENT, package, recipe_for, relative_error

from fusible import tex

BF16 = torch.bfloat16
RECIPES = pytest.mark.parametrize("recipe_name", RECIPES_OF_CLIENT)
BEFORE: dict[str, Callable[[], AbstractContextManager[Any]]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.fixture
def te() -> Iterator[Any]:
    with package() as te:
        torch.manual_seed(0)
        yield te


@RECIPES
def test_training_after_inference_is_that_after_no_grad(te: Any, recipe_name: str) -> None:
    """What delayed scaling keeps, it makes in the first pass, be that in ``torch.inference_mode``."""
    torch.manual_seed(0)
    x, found = torch.randn(128, 128, device="cuda", dtype=BF16), {}
    recipe = recipe_for(te, recipe_name, **({"disable_stochastic_rounding": True} if recipe_name == "nvfp4" else {}))
    for name, before in BEFORE.items():
        torch.manual_seed(1)
        module = te.LayerNormMLP(128, 256, params_dtype=BF16)
        results = []
        for _ in range(2):
            with before(), te.autocast(recipe=recipe):
                results.append(module(x).clone())
            with te.autocast(recipe=recipe):
                y = module(x)
            y.float().pow(2).sum().backward()
            results.append(y.detach())
        found[name] = [*results, *(parameter.grad for parameter in module.parameters())]
    for one, other in zip(*found.values(), strict=True):
        assert torch.equal(one, other) and one.isfinite().all()


@RECIPES
def test_a_copy_of_a_weight_from_inference_is_written_again(te: Any, recipe_name: str) -> None:
    recipe = recipe_for(te, recipe_name)
    x, found = torch.randn(128, 128, device="cuda", dtype=BF16), {}
    for name, before in BEFORE.items():
        torch.manual_seed(1)
        module = te.Linear(128, 128, params_dtype=BF16)
        with before(), te.autocast(recipe=recipe):
            module(x, is_first_microbatch=True)
        module.weight.data.mul_(-0.5)
        with torch.no_grad(), te.autocast(recipe=recipe):
            found[name] = module(x, is_first_microbatch=True)
    assert torch.equal(*found.values()) and found["no_grad"].any()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_a_tensor_without_a_dimension_is_quantized(te: Any, name: str, dtype: torch.dtype, backend: str) -> None:
    x = torch.tensor(3.3, device="cuda", dtype=dtype)
    with tex.set_backend(backend):
        made = QUANTIZERS[name](te)(x)
        assert made.shape == made._data.shape == tex.dequantize(made, tex.DType.kFloat32).shape == made.dequantize().shape == ()
        assert relative_error(made.dequantize(), x) <= EPSILON_OF_QUANTIZER[name]


@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (2, 0, 128)], ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_tensor_without_an_element_is_quantized(te: Any, name: str, shape: tuple[int, ...]) -> None:
    quantizer, x = QUANTIZERS[name](te), torch.empty(shape, device="cuda", dtype=BF16)
    assert quantizer(x).dequantize().shape == shape
    if name == "delayed":
        assert quantizer.amax.tolist() == [0.0]


@pytest.mark.parametrize("nominal", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("operand", [0, 1], ids="AB")
@pytest.mark.parametrize("name", QUANTIZERS)
def test_an_operand_that_stands_for_fp8(te: Any, name: str, operand: int, nominal: torch.dtype) -> None:
    """As does a parameter that was made in FP8: what the product is in, the caller says."""
    gemm = importlib.import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
    x, operands = torch.randn(128, 128, device="cuda", dtype=BF16), []
    for _ in range(2):
        quantizer = QUANTIZERS[name](te)
        quantizer.internal = True
        operands.append(quantizer(x))
    expected = gemm(*operands, out_dtype=BF16)[0]
    operands[operand]._dtype = nominal
    found = gemm(*operands, out_dtype=BF16)[0]
    assert found.dtype is BF16 and torch.equal(found, expected)
    assert relative_error(found, x.double() @ x.double().T) <= 2**0.5 * EPSILON_OF_QUANTIZER[name]
    out = torch.empty(128, 128, device="cuda")
    assert torch.equal(gemm(*operands, out_dtype=torch.float32, out=out)[0].to(BF16), expected)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_the_router_writes_its_choice_in_an_integer_type(te: Any, dtype: torch.dtype) -> None:
    router = importlib.import_module("transformer_engine.pytorch.router")
    logits, plain = (torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    indices = torch.zeros(8, 2, dtype=dtype, device="cuda")
    probs, chosen = router.fused_topk_with_score_function(logits, 2, False, None, None, None, "softmax", None, topk_indices=indices)
    top = plain.topk(2, dim=1)
    expected = torch.zeros(8, 4).scatter(1, top.indices, top.values.softmax(1))
    assert chosen.dtype is dtype and torch.equal(chosen.long(), top.indices)
    torch.testing.assert_close(probs, expected, rtol=2.0**-19, atol=2.0**-23)
    for each in (probs, expected):
        each.pow(2).sum().backward()
    torch.testing.assert_close(logits.grad, plain.grad, rtol=2.0**-17, atol=2.0**-19)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_quantizer_that_nobody_asks_for_its_amax(te: Any, backend: str) -> None:
    """An empty amax stays so, whatever the quantizer is given to."""
    x, quantizer = torch.randn(128, 128, device="cuda"), te.Float8Quantizer(torch.full((1,), 16.0), torch.empty(0), te.DType.kFloat8E4M3)
    with tex.set_backend(backend):
        made = quantizer(x)
        activated = tex.gelu(x, quantizer)
    assert quantizer.amax.shape == (0,)
    assert relative_error(made.dequantize(), x) <= EPSILON_OF_QUANTIZER["delayed"]
    assert relative_error(activated.dequantize(), torch.nn.functional.gelu(x.double(), approximate="tanh")) <= EPSILON_OF_QUANTIZER["delayed"]
