"""Models under ``torch.compile``, and how their trainings are compared."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fusible
from fusible.pytorch import ops
from fusible.quantized import DelayedScaling, Float8CurrentScaling, HighPrecision, Recipe

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler")

WIDTH = 32
DELAYED = DelayedScaling(amax_history_len=3)
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "high": HighPrecision("float32"),
    "delayed": DELAYED,
    "current": Float8CurrentScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
    "nvfp4": fusible.NVFP4BlockScaling(),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def block(*more: nn.Module) -> fusible.Sequential:
    return fusible.Sequential(fusible.LayerNorm(WIDTH), fusible.Linear(WIDTH, 64), fusible.GELU(), fusible.Linear(64, WIDTH), *more)


def operations(*more: nn.Module) -> ops.Sequential:
    return ops.Sequential(ops.RMSNorm(WIDTH), ops.Linear(WIDTH, 64), ops.SiLU(), ops.Linear(64, WIDTH), *more)


def transformer() -> fusible.Sequential:
    attention = fusible.DotProductAttention(2, 16)
    attend = [fusible.LayerNorm(WIDTH), fusible.Linear(WIDTH, 3 * WIDTH), attention, fusible.Dropout(0.25), fusible.Linear(WIDTH, WIDTH)]
    return fusible.Sequential(fusible.Residual(*attend), fusible.Residual(*block()))


def outside(recipe: Recipe | None, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        with fusible.autocast(enabled=recipe is not None, recipe=recipe):
            return call(*args)

    return run


def tokens(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (2, 16)), WIDTH, generator=generator).to(dtype)


def train(call: Callable[[Tensor], Tensor], model: nn.Module, steps: int = 4, batch: Callable[[int], Tensor] = tokens) -> list[Tensor]:
    """Losses, gradients of the inputs and the final parameters of a short training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Tensor] = []
    torch.manual_seed(1)
    for step in range(steps):
        x = batch(step).requires_grad_()
        loss = call(x).float().square().mean()
        loss.backward()
        assert x.grad is not None
        seen += [loss.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(parameter.detach() for parameter in model.parameters())]


def same(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def states(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if "scaling_state" in name}


def compiled_by(backend: str, call: Callable[..., Any]) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(call, fullgraph=True, backend=counter), counter
