"""The fast path takes as little Python as it can: what it gives is, to the bit, what the way of all other plans gives, which is taken here by saying
of the same plan that it is not on the fast path."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusible
import fusible.pytorch as fp
from fusible import tex
from fusible.compute_pipeline import ComputePipeline, Plan
from fusible.pytorch import ops
from fusible.quantized import Float8CurrentScaling, Float8CurrentScalingQuantizer

H, TOKENS = 32, 6


def _layers() -> nn.Module:
    body = fusible.Sequential(fusible.LayerNorm(H), fusible.Linear(H, 2 * H), fusible.SwiGLU(), fusible.Linear(H, H, bias=False))
    return fusible.Sequential(fusible.Linear(H, H), fusible.GELU(), fusible.Residual(body), fusible.RMSNorm(H))


def _long() -> nn.Module:
    """Long enough for several segments."""
    return fusible.Sequential(*(module for _ in range(12) for module in (fusible.Linear(H, H), fusible.SiLU())))


def _operations() -> nn.Module:
    return ops.Sequential(ops.LayerNorm(H), ops.Linear(H, H), ops.GELU(), ops.Linear(H, H))


MODELS: dict[str, Callable[[], nn.Module]] = {"layers": _layers, "long": _long, "operations": _operations}


def _plans(model: Any) -> list[Plan]:
    return [plan for runner in _runners(model) for plan in runner._plans.values()]


def _runners(model: Any) -> list[Any]:
    runners = [part for part in model._arranged() if hasattr(part, "_plans")]
    assert runners, "the model is to be one pipeline"
    return runners


@pytest.fixture
def other_way(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called: plans that are made from now on are not on the fast path."""
    made = ComputePipeline.plan

    def change() -> None:
        monkeypatch.setattr(ComputePipeline, "plan", lambda self, request: dataclasses.replace(made(self, request), fast_path=False))

    return change


def _x(dtype: torch.dtype, grad: bool = True, shape: tuple[int, ...] = (TOKENS, H)) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


def _plain(model: nn.Module, dtype: torch.dtype) -> list[Any]:
    x = _x(dtype)
    y = model(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters())]


def _frozen(model: nn.Module, dtype: torch.dtype) -> list[Any]:
    for place, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(place % 3 == 1)
    x = _x(dtype, grad=False)
    y = model(x)
    y.square().sum().backward()
    return [y, *(p.grad for p in model.parameters())]


def _twice(model: nn.Module, dtype: torch.dtype) -> list[Any]:
    x = _x(dtype, shape=(2, TOKENS, H))
    y = model(x)
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters())]


def _inference(model: nn.Module, dtype: torch.dtype) -> list[Any]:
    with torch.no_grad():
        return [model(_x(dtype)), model(_x(dtype, shape=(2, TOKENS, H)))]


def _checkpointed(model: nn.Module, dtype: torch.dtype) -> list[Any]:
    x = _x(dtype)
    y = checkpoint(model, x, use_reentrant=False)
    assert isinstance(y, torch.Tensor)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters())]


def _inside_autocast(model: nn.Module, dtype: torch.dtype) -> list[Any]:
    x = _x(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
        y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters())]


def _quantized_gradient(model: nn.Module, dtype: torch.dtype) -> list[Any]:
    x = _x(dtype)
    y = model(x)
    y.backward(_E5M2(torch.randn_like(y)))
    return [y, x.grad, *(p.grad for p in model.parameters())]


_E5M2 = Float8CurrentScalingQuantizer(tex.DType.kFloat8E5M2, device=torch.device("cpu"), force_pow_2_scales=True)
"""Of whose values bf16 holds each, so that it does not matter where they are decoded."""
CALLS = (_plain, _frozen, _twice, _inference, _checkpointed, _inside_autocast, _quantized_gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__.strip("_"))
@pytest.mark.parametrize("model", MODELS)
def test_it_is_the_same_to_the_bit(model: str, call: Any, dtype: torch.dtype, other_way: Callable[[], None]) -> None:
    if dtype is torch.float64 and call in (_inside_autocast, _quantized_gradient):
        pytest.skip("torch.autocast leaves fp64 alone, and nothing in 8 bits stands for fp64")
    torch.manual_seed(0)
    one = MODELS[model]().to(dtype)
    two = copy.deepcopy(one)
    found = []
    for module in (one, two):
        results = []
        for time in range(3):  # as it comes, listened to, replayed
            torch.manual_seed(time)
            results += call(module, dtype)
            for parameter in module.parameters():
                parameter.grad = None
        found.append(results)
        assert all(plan.fast_path is (module is one) for plan in _plans(module)) and _plans(module)
        other_way()
    for got, wanted in zip(*found, strict=True):
        assert (got is None) is (wanted is None)
        if got is not None:
            assert got.dtype is wanted.dtype
            assert torch.equal(got, wanted)


class _Doubled(ops.BasicOperation):
    def op_forward(self, ctx: Any, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        return 2 * input_

    def op_backward(self, ctx: Any, grad_output: torch.Tensor) -> Any:
        return 2 * grad_output, ()


OFF_IT: dict[str, Callable[[], nn.Module]] = {
    "a value of the call": lambda: fusible.Sequential(fusible.Linear(H, H), fusible.Dropout(0.5)),
    "sequences": lambda: fusible.Sequential(fusible.Linear(H, 3 * H), fusible.DotProductAttention(4, H // 4)),
    "a side value of the caller": lambda: ops.Sequential(ops.Linear(H, H), ops.AddExtraInput()),
    "a side value for the caller": lambda: ops.Sequential(ops.MakeExtraOutput(), ops.Linear(H, H)),
    "code of the caller": lambda: ops.Sequential(ops.Linear(H, H), _Doubled()),
    "a quantized output": lambda: ops.Sequential(ops.GELU(), ops.Quantize()),
}


@pytest.mark.parametrize("what", OFF_IT)
def test_what_hangs_on_more_is_not_on_it(what: str) -> None:
    model = OFF_IT[what]()
    recipe = Float8CurrentScaling() if what == "a quantized output" else None
    extra = [_x(torch.float32)] if what == "a side value of the caller" else []
    with fp.autocast(enabled=recipe is not None, recipe=recipe):
        model(torch.randn(32, H), *[x.new_ones(32, H) for x in extra])
    assert [plan.fast_path for plan in _plans(model)] == [False]


@pytest.mark.parametrize("recipe", [fp.DelayedScaling(), Float8CurrentScaling(), fusible.MXFP8BlockScaling()], ids=lambda r: type(r).__name__)
def test_what_is_quantized_is_not_on_it(recipe: Any) -> None:
    model = _layers()
    model(torch.randn(32, H)).sum().backward()
    with fp.autocast(enabled=True, recipe=recipe):
        model(torch.randn(32, H)).sum().backward()
    assert [plan.fast_path for plan in _plans(model)] == [True, False]


def test_a_call_that_adds_to_main_grad_adds_to_it() -> None:
    model = ops.Sequential(ops.Linear(H, H, accumulate_into_main_grad=True), ops.GELU())
    twin = copy.deepcopy(model)
    weight, x = model[0].weight, torch.randn(TOKENS, H)  # pyright: ignore[reportIndexIssue]
    weight.main_grad = torch.ones(H, H)
    model(x).sum().backward()
    twin(x).sum().backward()
    assert all(plan.fast_path for plan in (*_plans(model), *_plans(twin)))
    torch.testing.assert_close(weight.main_grad, twin[0].weight.grad + 1)  # pyright: ignore[reportIndexIssue]
