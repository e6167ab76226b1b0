"""A model on the CPU trains and generates there, to the bit, while torch's default device is another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny_language_models import TinyModel

import fusible
import fusible.pytorch.ops as ops
from fusible import GELU, Dropout, LayerNorm, Linear, MixtureOfExperts, MultiHeadedSelfAttention, Residual, RMSNorm, Sequential
from fusible.pytorch import KVCache

RECIPES: dict[str, fusible.Recipe | None] = {
    "bf16": None,
    "delayed": fusible.DelayedScaling(),
    "current": fusible.Float8CurrentScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
    "blocks": fusible.Float8BlockScaling(),
    "nvfp4": fusible.NVFP4BlockScaling(),
}


def of_modules(executor: str) -> Sequential:
    attention = (LayerNorm(64), Linear(64, 192), MultiHeadedSelfAttention(64, heads=4, rope_base=10000.0), Dropout(0.1), Linear(64, 64))
    model = Sequential(Residual(*attention), Residual(RMSNorm(64), Linear(64, 256), GELU(), Linear(256, 64)))
    if executor == "xla":
        return model.compile("xla")
    return Sequential(*model, Residual(LayerNorm(64), MixtureOfExperts(64, 128, experts=4, top_k=2)))


def of_operations(executor: str) -> Any:
    return ops.Sequential(ops.LayerNorm(64), ops.Linear(64, 128), ops.GELU(), ops.Linear(128, 64), ops.ReLU())


def trained(make: Callable[[str], Any], executor: str, recipe: fusible.Recipe | None, device: str | None) -> list[torch.Tensor]:
    """Outputs of four steps and of inference, with the state saved and loaded between, and the last gradient of the input."""
    torch.manual_seed(0)
    model, x = make(executor).to(torch.bfloat16), torch.randn(2, 32, 64, dtype=torch.bfloat16, requires_grad=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found: list[torch.Tensor] = []
    with torch.device(device) if device is not None else nullcontext():
        for _ in range(4):
            optimizer.zero_grad()
            with fusible.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(x)
            y.square().sum().backward()
            optimizer.step()
            found.append(y.detach().clone())
        model.load_state_dict(model.state_dict())
        model.eval()
        with torch.no_grad(), fusible.autocast(enabled=recipe is not None, recipe=recipe):
            found.append(model(x))
    assert x.grad is not None
    return [*found, x.grad]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make, executor", [(of_modules, "eager"), (of_modules, "xla"), (of_operations, "eager")], ids=["eager", "xla", "operations"])
def test_training(make: Callable[[str], Any], executor: str, recipe: str) -> None:
    here, wanted = (trained(make, executor, RECIPES[recipe], device) for device in ("meta", None))
    assert all(torch.equal(a, b) for a, b in zip(here, wanted, strict=True))


@pytest.mark.parametrize("recipe", ["bf16", "current", "mxfp8"])
def test_generation(recipe: str) -> None:
    def tokens(device: str | None) -> list[list[int]]:
        model = TinyModel()
        cache, read = KVCache(2, 64, dtype=torch.float32), [[1, 2, 3], [4, 5]]
        with torch.no_grad(), torch.device(device) if device is not None else nullcontext():
            new = read
            for _ in range(8):
                flat = torch.tensor([token for row in new for token in row], device="cpu")
                lengths = torch.tensor([len(row) for row in new], dtype=torch.int32, device="cpu")
                with fusible.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
                    new = model.next_logits(flat, lengths, cache).argmax(-1, keepdim=True).tolist()
                read = [row + more for row, more in zip(read, new, strict=True)]
        return read

    assert tokens("meta") == tokens(None)
