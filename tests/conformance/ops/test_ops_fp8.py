"""Linear layers and blocks with 8-bit operands, against float64."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ops_tolerance import assert_close
from torch import Tensor, nn

from fusible import GELU, DelayedScaling, Float8CurrentScaling, Format, LayerNorm, Linear, Recipe, Residual, RMSNorm, Sequential, SwiGLU, autocast

ORACLE = {"E4M3": (ml_dtypes.float8_e4m3fn, 448.0), "E5M2": (ml_dtypes.float8_e5m2, 57344.0)}
RMS = {"E4M3": 0.204 * 2.0**-3, "E5M2": 0.204 * 2.0**-2}
"""The relative error of a rounding, root mean square: ``eps / sqrt(12)`` of the power of two below a value, on average ``sqrt(1/2)`` of it."""


def quantized(x: Tensor, scale: float | np.float32, format_: str) -> Tensor:
    """What an 8-bit copy of ``x`` stands for, in float64, by ml_dtypes."""
    dtype, largest = ORACLE[format_]
    scale = np.float32(scale)
    q = np.clip(x.detach().float().numpy() * scale, -largest, largest).astype(dtype).astype(np.float64)
    return torch.from_numpy(q) * float(np.float32(1) / scale)


def own_scale(x: Tensor, format_: str, power_of_two: bool) -> np.float32:
    amax = np.float32(x.detach().float().abs().max().item())
    scale = np.float32(ORACLE[format_][1]) / amax
    return np.float32(2.0 ** np.floor(np.log2(np.float64(scale)))) if power_of_two else scale


FP8_FORMATS = [Format.E4M3, Format.E5M2, Format.HYBRID]
CURRENT = [(Float8CurrentScaling(fp8_format=f, use_power_2_scales=p), p) for f in FP8_FORMATS for p in (False, True)]


def formats(format_: Format) -> tuple[str, str]:
    return ("E5M2" if format_ is Format.E5M2 else "E4M3"), ("E4M3" if format_ is Format.E4M3 else "E5M2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("tokens", [1, 13, 17])
@pytest.mark.parametrize(("recipe", "power_of_two"), [pytest.param(*c, id=f"{c[0].fp8_format.name}{'-pow2' if c[1] else ''}") for c in CURRENT])
def test_a_linear_layer_is_exact_on_its_8_bit_operands(recipe: Float8CurrentScaling, power_of_two: bool, tokens: int, dtype: torch.dtype) -> None:
    """Current scaling: with the operands that ml_dtypes quantizes, nothing is left but fp32 sums and the rounding of the result."""
    torch.manual_seed(tokens)
    module = Linear(23, 11)
    x, dy = torch.randn(tokens, 23).to(dtype).requires_grad_(), torch.randn(tokens, 11).to(dtype)
    with autocast(recipe=recipe):
        y = module(x)
    y.backward(dy)
    forward, backward = formats(recipe.fp8_format)
    xq = quantized(x, own_scale(x, forward, power_of_two), forward)
    wq = quantized(module.weight, own_scale(module.weight, forward, power_of_two), forward)
    dyq = quantized(dy, own_scale(dy, backward, power_of_two), backward)
    assert x.grad is not None
    assert_close("y", y.detach(), xq @ wq.T + module.bias.detach().double(), dtype, 23, 2)
    assert_close("dx", x.grad, dyq @ wq, dtype, 11)
    assert_close("dweight", module.weight.grad, dyq.T @ xq, torch.float32, tokens)
    # Summed in fp32 while dy is quantized, and given in dy's dtype.
    assert module.bias.grad.dtype is torch.float32
    assert_close("dbias", module.bias.grad.to(dtype), dy.double().sum(0), dtype, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("format_", FP8_FORMATS, ids=lambda f: f.name)
def test_a_linear_layer_follows_its_delayed_scales(format_: Format, dtype: torch.dtype) -> None:
    """Each step quantizes by the amaxes of the steps before it: of growing inputs some values saturate. The weight changes as if optimized; one that
    did not would keep the scale of when it last did."""
    torch.manual_seed(1)
    module, (forward, backward) = Linear(23, 11), formats(format_)
    largest = {name: [0.0] for name in ("x", "weight", "dy")}
    recipe = DelayedScaling(fp8_format=format_, amax_history_len=3)
    for step in range(5):
        x, dy = (torch.randn(13, 23) * 1.5**step).to(dtype).requires_grad_(), (torch.randn(13, 11) * 0.7**step).to(dtype)
        module.zero_grad()
        with torch.no_grad():
            module.weight.mul_(1.1)
        with autocast(recipe=recipe):
            y = module(x)
        y.backward(dy)
        scale = {}
        for name, tensor, format_name in (("x", x, forward), ("weight", module.weight, forward), ("dy", dy, backward)):
            window = max(largest[name][-3:])
            scale[name] = np.float32(ORACLE[format_name][1]) / np.float32(window) if window else np.float32(1)
            largest[name].append(tensor.detach().float().abs().max().item())
        xq, wq, dyq = quantized(x, scale["x"], forward), quantized(module.weight, scale["weight"], forward), quantized(dy, scale["dy"], backward)
        assert_close(f"y of step {step}", y.detach(), xq @ wq.T + module.bias.detach().double(), dtype, 23, 2)
        assert_close(f"dx of step {step}", x.grad, dyq @ wq, dtype, 11)
        assert_close(f"dweight of step {step}", module.weight.grad, dyq.T @ xq, torch.float32, 13)
        assert_close(f"dbias of step {step}", module.bias.grad.to(dtype), dy.double().sum(0), dtype, 13)


def _mlp() -> Sequential:
    return Sequential(LayerNorm(24), Linear(24, 40), GELU(), Linear(40, 24))


def _gated() -> Sequential:
    return Sequential(Residual(RMSNorm(24), Linear(24, 60, bias=False), SwiGLU(), Linear(30, 24, bias=False)))


def _chain() -> Sequential:
    return Sequential(Linear(24, 30, bias=False), Linear(30, 24, bias=False), Linear(24, 24))


def _reference(model: nn.Module, x: Tensor) -> Tensor:
    if isinstance(model, Sequential | Residual):
        y = x
        for child in model.children():
            y = _reference(child, y)
        return x + y if isinstance(model, Residual) else y
    if isinstance(model, Linear):
        return F.linear(x, model.weight, model.bias)
    if isinstance(model, LayerNorm):
        return F.layer_norm(x, (model.features,), model.weight, model.bias, model.eps)
    if isinstance(model, RMSNorm):
        return F.rms_norm(x, (model.features,), model.weight, model.eps)
    if isinstance(model, SwiGLU):
        a, b = x.chunk(2, -1)
        return F.silu(a) * b
    assert isinstance(model, GELU)
    return F.gelu(x, approximate="tanh")


RECIPES = (DelayedScaling(amax_history_len=4), Float8CurrentScaling(), Float8CurrentScaling(use_power_2_scales=True))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("make", [_mlp, _gated, _chain], ids=lambda make: make.__name__[1:])
def test_a_block_is_near_float64(make: Callable[[], Sequential], recipe: Recipe) -> None:
    """Relative Frobenius norms. The errors of the roundings on the way are independent and add up as squares; the bound is twice that.

    Forward passes two 8-bit operands per product; backward those and a gradient in E5M2 per product.
    """
    torch.manual_seed(1)
    model = make()
    products = sum(isinstance(m, Linear) for m in model.modules())
    forward = 2 * (2 * products * RMS["E4M3"] ** 2) ** 0.5
    backward = 2 * (2 * products * RMS["E4M3"] ** 2 + products * RMS["E5M2"] ** 2) ** 0.5
    x, dy = torch.randn(29, 24), torch.randn(29, 24)
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        with autocast(recipe=recipe):
            y = model(leaf)
        y.backward(dy)
    twin = make().double()
    twin.load_state_dict({name: p.detach().double() for name, p in model.named_parameters()})
    exact = x.double().requires_grad_()
    reference = _reference(twin, exact)
    reference.backward(dy.double())
    found = [(y, reference, forward), (leaf.grad, exact.grad, backward)]
    found += [(p.grad, q.grad, backward) for p, q in zip(model.parameters(), twin.parameters(), strict=True)]
    for got, wanted, bound in found:
        error = ((got.double() - wanted).norm() / wanted.norm()).item()
        assert error <= bound, f"{list(wanted.shape)}: {error:.3f}, at most {bound:.3f}"
