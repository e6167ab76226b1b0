"""Optimizers that step in backward: the numbers of a step after it, and never all gradients together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import fusible
from fusible.errors import ArgumentError
from fusible.quantized import QuantizedTensor

WIDTH = 32
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda of: fusible.FusedAdam(of, lr=0.01, weight_decay=0.1),
    "adam with masters": lambda of: fusible.FusedAdam(of, lr=0.01, master_weights=True),
    "adam in few bits": lambda of: fusible.FusedAdam(
        of, lr=0.01, exp_avg_dtype=torch.uint8, exp_avg_sq_dtype=torch.float16, master_weights=True, store_param_remainders=True
    ),
    "momentum": lambda of: fusible.FusedSGD(of, lr=0.05, momentum=0.9, dampening=0.3),
}


class Tied(nn.Module):
    """Two modules of Fusible's whose weight is one parameter, and torch's in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = fusible.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), fusible.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def blocks() -> nn.Module:
    return fusible.Sequential(fusible.LayerNorm(WIDTH), fusible.Linear(WIDTH, 2 * WIDTH), fusible.GELU(), fusible.Linear(2 * WIDTH, WIDTH))


def held() -> nn.Module:
    with fusible.quantized_model_init(recipe=fusible.MXFP8BlockScaling()):
        return fusible.Sequential(fusible.Linear(WIDTH, WIDTH), fusible.Linear(WIDTH, WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {"blocks": blocks, "tied": Tied, "weights in 8 bits": held, "torch's": lambda: nn.Linear(WIDTH, WIDTH)}


def made(model: str, optimizer: str, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    module = MODELS[model]().to(dtype)
    return module, OPTIMIZERS[optimizer](module.parameters())


@contextmanager
def most_gradients(module: nn.Module) -> Iterator[list[int]]:
    """The numbers of gradients that there were whenever one was whole."""
    found: list[int] = []
    count = lambda _: found.append(sum(p.grad is not None for p in module.parameters()))  # noqa: E731
    handles = [p.register_post_accumulate_grad_hook(count) for p in module.parameters()]
    yield found
    for handle in handles:
        handle.remove()


def backward(module: nn.Module, seed: int, dtype: torch.dtype) -> None:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)
    with fusible.autocast(recipe=fusible.DelayedScaling()):
        module(x).float().square().mean().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_numbers_are_those_of_a_step_after_backward(optimizer: str, model: str, dtype: torch.dtype) -> None:
    (early, stepping), (late, plain) = made(model, optimizer, dtype), made(model, optimizer, dtype)
    handle = stepping.step_in_backward()
    for step in range(6):
        if step == 4:
            handle.remove()
        with most_gradients(early) as there:
            backward(early, step, dtype)
        backward(late, step, dtype)
        assert max(there) <= 1 if step < 4 else max(there) > 1
        for each in (stepping, plain):
            each.step()
            each.zero_grad()
    for a, b in zip(early.parameters(), late.parameters(), strict=True):
        assert torch.equal(*(x.dequantize() if isinstance(x, QuantizedTensor) else x for x in (a.detach(), b.detach())))
    assert stepping.param_groups[0].get("step") == plain.param_groups[0].get("step")


def test_what_has_a_gradient_otherwise_is_stepped_by_step() -> None:
    module, optimizer = made("torch's", "adam", torch.float32)
    optimizer.step_in_backward()
    extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    backward(module, 0, torch.float32)
    extra.grad = torch.ones(3)
    optimizer.step()
    assert torch.allclose(extra.detach(), torch.full((3,), 0.5 - 0.05)) and [group["step"] for group in optimizer.param_groups] == [1, 1]
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1, 2]  # the extra one's gradient is there still


def test_two_backwards_for_a_step_are_refused() -> None:
    module, optimizer = made("torch's", "adam", torch.float32)
    optimizer.step_in_backward()
    backward(module, 0, torch.float32)
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(ArgumentError, match=r"step_in_backward of FusedAdam: expected one gradient of a parameter until step\(\)"):
        backward(module, 1, torch.float32)
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize("optimizer", ["adam", "adam in few bits"])
def test_a_copy_made_before_step_counts_as_its_original_does(optimizer: str) -> None:
    module, stepping = made("torch's", optimizer, torch.bfloat16)
    stepping.step_in_backward()
    backward(module, 0, torch.bfloat16)
    _, copied = copy.deepcopy((module, stepping))
    for each in (stepping, copied):
        each.step()
        assert [group["step"] for group in each.param_groups] == [1]


def test_a_compiled_step_comes_after_backward() -> None:
    optimizer = fusible.FusedAdam(nn.Linear(4, 4).parameters(), executor="xla")
    with pytest.raises(ArgumentError, match="step_in_backward of FusedAdam: expected an eager step"):
        optimizer.step_in_backward()


def test_gradients_that_others_make_are_not_lost() -> None:
    module = nn.Linear(4, 4)
    optimizer = fusible.FusedAdam(module.parameters(), use_decoupled_grad=True)
    with pytest.raises(ArgumentError, match="step_in_backward of FusedAdam: expected gradients that backward makes, got those in decoupled_grad"):
        optimizer.step_in_backward()
    module(torch.ones(2, 4)).sum().backward()
    assert module.weight.grad is not None
