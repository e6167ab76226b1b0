"""The modules of NVIDIA's Python package, under each of its recipes: forward, backward, optimizer step and state dict through ``fusible.tex``."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from te_client import EPSILON, package, recipe_for, relative_error

from fusible import tex

RECIPES = ("bf16", "delayed", "current", "block", "mxfp8", "nvfp4")
HIDDEN, FFN, HEADS, TOKENS, BATCH = 128, 256, 4, 128, 4
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A module: how it is made, the matrix products on the longest way through it, and how it is called."""

    make: Callable[[Any], torch.nn.Module]
    products: int
    call: Callable[[Any, torch.Tensor], Any] = lambda module, x: module(x)
    sequences: bool = False


def _sequential(te: Any) -> torch.nn.Module:
    ops = te.ops
    return ops.Sequential(ops.LayerNorm(HIDDEN, dtype=BF16), ops.Linear(HIDDEN, FFN, dtype=BF16), ops.GELU(), ops.Linear(FFN, HIDDEN, dtype=BF16))


NO_DROPOUT = {"attention_dropout": 0.0, "params_dtype": BF16}
CASES = {
    "Linear": Case(lambda te: te.Linear(HIDDEN, FFN, params_dtype=BF16), 1),
    "LayerNorm": Case(lambda te: te.LayerNorm(HIDDEN, params_dtype=BF16), 0),
    "RMSNorm": Case(lambda te: te.RMSNorm(HIDDEN, params_dtype=BF16), 0),
    "LayerNormLinear": Case(lambda te: te.LayerNormLinear(HIDDEN, FFN, params_dtype=BF16), 1),
    "LayerNormMLP": Case(lambda te: te.LayerNormMLP(HIDDEN, FFN, params_dtype=BF16), 2),
    "LayerNormMLP of SwiGLU": Case(lambda te: te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", normalization="RMSNorm", params_dtype=BF16), 2),
    "GroupedLinear": Case(
        lambda te: te.GroupedLinear(2, HIDDEN, FFN, params_dtype=BF16),
        1,
        call=lambda module, x: module(x, [TOKENS // 2, TOKENS // 2]),
    ),
    "MultiheadAttention": Case(lambda te: te.MultiheadAttention(HIDDEN, HEADS, **NO_DROPOUT), 4, sequences=True),
    "TransformerLayer": Case(lambda te: te.TransformerLayer(HIDDEN, FFN, HEADS, hidden_dropout=0.0, **NO_DROPOUT), 6, sequences=True),
    "ops.Sequential": Case(_sequential, 2),
}


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")  # the package's own switch for its state of delayed scaling
    with package() as te:
        yield te


def batch(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (TOKENS // BATCH, BATCH, HIDDEN) if case.sequences else (TOKENS, HIDDEN)
    torch.manual_seed(1)
    return torch.randn(shape, device="cuda", dtype=BF16), torch.randn(TOKENS, FFN, device="cuda", dtype=BF16)


def run(te: Any, case: Case, module: torch.nn.Module, recipe: Any, passes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the input's gradient of the last of some passes."""
    for _ in range(passes):
        x, weights = batch(case)
        x.requires_grad_()
        module.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = case.call(module, x)
        y = y[0] if isinstance(y, tuple) else y
        (y.float() * weights.flatten()[: y.numel()].view_as(y)).sum().backward()
        assert x.grad is not None
    return y.detach(), x.grad


def made(te: Any, case: Case) -> torch.nn.Module:
    torch.manual_seed(0)
    return case.make(te)


@pytest.mark.parametrize("recipe_name", RECIPES)
@pytest.mark.parametrize("name", CASES)
def test_a_module_trains_and_is_saved(te: Any, name: str, recipe_name: str) -> None:
    case = CASES[name]
    recipe = recipe_for(te, recipe_name)
    module = made(te, case)
    with tex.record() as calls:
        y, dx = run(te, case, module, recipe, passes=2)  # delayed scaling knows a tensor's amax from the second pass on
    products = [str(call.request) for call in calls if "gemm" in call.function]
    assert bool(products) == (case.products > 0)
    if recipe is not None:
        scaling = {"delayed": "float8", "current": "float8"}.get(recipe_name, recipe_name)
        assert all(scaling in product for product in products), products

    # Each product has two operands, each off by at most eps of its norm, and the errors of successive products are independent.
    plain_y, plain_dx = run(te, case, made(te, case), None, passes=1)
    assert relative_error(y, plain_y) <= EPSILON[recipe_name] * math.sqrt(2 * case.products)
    assert relative_error(dx, plain_dx) <= EPSILON[recipe_name] * math.sqrt(4 * case.products)  # the way back takes what the way there gave

    optimizer = te.optimizers.FusedAdam(module.parameters(), lr=0.01)
    former = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer.step()
    for parameter, old in zip(module.parameters(), former, strict=True):
        assert parameter.isfinite().all() and not torch.equal(parameter, old)

    saved = io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    restored = case.make(te)
    restored.load_state_dict(torch.load(saved, map_location="cuda", weights_only=True))
    assert torch.equal(run(te, case, restored, recipe, passes=1)[0], run(te, case, module, recipe, passes=1)[0])
