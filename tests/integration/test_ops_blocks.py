"""Blocks of models, each as one ``ops.Sequential``, in training under every recipe: the loss falls, and the first step is near float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantization_error import RECIPES, RMS
from torch import Tensor

from fusible import autocast
from fusible.pytorch import ops
from fusible.quantized import DelayedScaling, Format, Recipe

TOKENS, HIDDEN, RANK = 64, 64, 32


@dataclass(frozen=True)
class Block:
    """``reference(x, parameters, *extra)``: its outputs in float64, the parameters by their names in the model. ``products``: how many follow on one
    another. ``extras``: makes the extra inputs."""

    name: str
    make: Callable[[], ops.Sequential] = field(repr=False)
    reference: Callable[..., tuple[Tensor, ...]] = field(repr=False)
    products: int
    extras: Callable[[], list[Tensor]] = field(default=list, repr=False)


def _residual() -> tuple[ops.MakeExtraOutput, ops.AddExtraInput]:
    """The two ends of a tensor that goes around what lies between them."""
    begin, end = ops.MakeExtraOutput(), ops.AddExtraInput()
    begin.set_extra_output_channel(0, "residual", output_to_caller=False)
    end.set_extra_input_channel(0, "residual")
    return begin, end


def _lora() -> ops.Sequential:
    """``B A x`` and what the frozen layer gives for x, which comes as an extra input. Two products without anything between them."""
    return ops.Sequential(ops.Linear(HIDDEN, RANK, bias=False), ops.Linear(RANK, HIDDEN, bias=False), ops.AddExtraInput())


def _lora_reference(x: Tensor, p: dict[str, Tensor], frozen: Tensor) -> tuple[Tensor, ...]:
    return (x @ p["0.basic_ops.0.weight"].T @ p["1.basic_ops.0.weight"].T + frozen,)


def _mla() -> ops.Sequential:
    """Keys and values of multi-head latent attention: the normalized low-rank tensor is what a cache keeps."""
    down, up = ops.Linear(HIDDEN, RANK, bias=False), ops.Linear(RANK, 2 * HIDDEN, bias=False)
    return ops.Sequential(down, ops.RMSNorm(RANK), ops.MakeExtraOutput(), up)


def _mla_reference(x: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, ...]:
    latent = F.rms_norm(x @ p["0.basic_ops.0.weight"].T, (RANK,), p["1.weight"], 1e-5)
    return latent @ p["3.basic_ops.0.weight"].T, latent


def _mlp() -> ops.Sequential:
    begin, end = _residual()
    up, down = ops.Linear(HIDDEN, 4 * HIDDEN, bias=False), ops.Linear(2 * HIDDEN, HIDDEN, bias=False)
    return ops.Sequential(begin, ops.RMSNorm(HIDDEN), up, ops.SwiGLU(), down, end)


def _mlp_reference(x: Tensor, p: dict[str, Tensor]) -> tuple[Tensor, ...]:
    gate, value = (F.rms_norm(x, (HIDDEN,), p["1.weight"], 1e-5) @ p["2.basic_ops.0.weight"].T).chunk(2, -1)
    return (x + (F.silu(gate) * value) @ p["4.basic_ops.0.weight"].T,)


SPLITS = (32, 0, 32)


def _experts() -> ops.Sequential:
    """Experts on rows that are sorted by expert, one of them idle; the router's weights scale what comes between their two layers."""
    up, down = ops.GroupedLinear(len(SPLITS), HIDDEN, 4 * HIDDEN, bias=False), ops.GroupedLinear(len(SPLITS), 2 * HIDDEN, HIDDEN, bias=False)
    return ops.Sequential(up, ops.ScaledSwiGLU(), down)


def _experts_reference(x: Tensor, p: dict[str, Tensor], sizes: Tensor, scales: Tensor, _: Tensor) -> tuple[Tensor, ...]:
    found = []
    for i, (rows, scale) in enumerate(zip(x.split(sizes.tolist()), scales.split(sizes.tolist()), strict=True)):
        gate, value = (rows @ p[f"0.weight{i}"].T).chunk(2, -1)
        found.append((F.silu(gate) * value * scale[:, None]) @ p[f"2.weight{i}"].T)
    return (torch.cat(found),)


BLOCKS = [
    Block("LoRA", _lora, _lora_reference, 2, lambda: [torch.randn(TOKENS, HIDDEN)]),
    Block("MLA", _mla, _mla_reference, 2),
    Block("SwiGLU MLP", _mlp, _mlp_reference, 2),
    Block("mixture of experts", _experts, _experts_reference, 2, lambda: [torch.tensor(SPLITS), torch.rand(TOKENS) + 0.5, torch.tensor(SPLITS)]),
]
ALL: dict[str, Recipe | None] = {"none": None, **RECIPES}


def model_of(block: Block) -> ops.Sequential:
    torch.manual_seed(1)
    return block.make()


def forward(model: ops.Sequential, leaves: Sequence[Tensor], recipe: Recipe | None) -> tuple[Tensor, ...]:
    with autocast(enabled=recipe is not None, recipe=recipe):
        result: Any = model(*leaves)
    return result if isinstance(result, tuple) else (result,)


def bounds(block: Block, recipe: Recipe | None) -> tuple[float, float]:
    """Of the relative Frobenius norms of errors of results and of gradients. Errors of roundings are independent and add up as squares; the bound is
    twice that. Forward has two quantized operands per product; backward those, a gradient per product, and the copies of operands along the other
    dimension, which have roundings of their own. Stochastic rounding doubles the variance of a gradient's, and fp32 alone leaves 1e-5."""
    if recipe is None:
        return 1e-5, 1e-5
    forward_format, backward_format, stochastic = "E4M3", "E4M3", 1
    if recipe.nvfp4():
        forward_format, backward_format, stochastic = "E2M1", "E2M1", 2
    elif recipe.fp8_format is Format.HYBRID:  # type: ignore[attr-defined]
        backward_format = "E5M2"
    ahead = 2 * block.products * RMS[forward_format] ** 2
    back = 2 * ahead + stochastic * block.products * RMS[backward_format] ** 2
    return 2 * ahead**0.5, 2 * back**0.5


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_the_first_step_is_near_float64(block: Block, name: str) -> None:
    """Under delayed scaling the first step after those that give it scales."""
    recipe, model = ALL[name], model_of(block)
    leaves = [leaf.requires_grad_(leaf.is_floating_point()) for leaf in (torch.randn(TOKENS, HIDDEN), *block.extras())]
    dys: list[Tensor] = []
    outputs: tuple[Tensor, ...] = ()
    for _ in range(3 if isinstance(recipe, DelayedScaling) else 1):
        for leaf in (*leaves, *model.parameters()):
            leaf.grad = None
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1)  # a weight takes a new scale when it has been written to
        outputs = forward(model, leaves, recipe)
        dys = dys or [torch.randn(output.shape) for output in outputs]
        torch.autograd.backward(outputs, dys)
    exact = [leaf.detach().double().requires_grad_() if leaf.requires_grad else leaf for leaf in leaves]
    parameters = {key: p.detach().double().requires_grad_() for key, p in model.named_parameters()}
    x, *extra = exact
    wanted = block.reference(x, parameters, *extra)
    torch.autograd.backward(wanted, [dy.double() for dy in dys])
    ahead, back = bounds(block, recipe)
    found: list[tuple[str, Tensor | None, Tensor | None, float]]
    found = [(f"output {i}", o.detach(), w.detach(), ahead) for i, (o, w) in enumerate(zip(outputs, wanted, strict=True))]
    named = [("x", leaves[0], x), *((f"extra {i}", *pair) for i, pair in enumerate(zip(leaves[1:], extra, strict=True)))]
    named += [(key, p, parameters[key]) for key, p in model.named_parameters()]
    found += [(f"d{key}", leaf.grad, twin.grad, back) for key, leaf, twin in named]
    for what, got, reference, bound in found:
        if what in ("dextra 0", "dextra 2") and got is None:
            continue  # sizes have no gradient
        assert got is not None and reference is not None
        error, size = (got.double() - reference).norm().item(), reference.norm().item()  # of an idle expert's weight both are 0
        assert error <= bound * size, f"{what}: {error:.4f}, at most {bound:.4f} of {size:.4f}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_ten_steps_make_the_loss_fall(block: Block, name: str, dtype: torch.dtype) -> None:
    """On targets that a model of the same kind gives: by half, and step by step but for the noise of the format."""
    recipe, model = ALL[name], model_of(block).to(dtype)
    torch.manual_seed(2)
    teacher = block.make()
    leaves = [torch.randn(TOKENS, HIDDEN), *block.extras()]
    with torch.no_grad():
        targets = [target.to(dtype) for target in forward(teacher, leaves, None)]
    leaves = [leaf.to(dtype) if leaf.is_floating_point() else leaf for leaf in leaves]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        outputs = forward(model, leaves, recipe)
        loss = sum(F.mse_loss(output.float(), target.float()) for output, target in zip(outputs, targets, strict=True))
        assert isinstance(loss, Tensor)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses
    assert all(later < 1.1 * earlier for earlier, later in zip(losses, losses[2:], strict=False)), losses


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_a_block_is_one_pipeline_that_is_planned_once(block: Block, name: str) -> None:
    recipe, model = ALL[name], model_of(block)
    leaves = [torch.randn(TOKENS, HIDDEN), *block.extras()]
    for _ in range(3):
        sum(output.sum() for output in forward(model, leaves, recipe)).backward()  # type: ignore[union-attr]
    assert len(model._arranged()) == 1 and model._arranged()[0].pipeline.plans_built == 1
