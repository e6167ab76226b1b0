"""Modules under delayed scaling, of NVIDIA's package and ours, and their training steps: what tests of their saved states share."""

from __future__ import annotations

from typing import Any

import torch
from te_client import recipe_for

import fusible
from fusible.compat import te_modules

__all__ = ["MODULES", "OPTIONS", "SIZE", "stepped"]

SIZE, OPTIONS = 32, {"amax_history_len": 4, "margin": 1}
MODULES: dict[str, tuple[Any, ...]] = {
    "Linear": (SIZE, 64),
    "LayerNormLinear": (SIZE, 64),
    "LayerNormMLP": (SIZE, 64),
    "GroupedLinear": (2, SIZE, 64),
    "TransformerLayer": (SIZE, 64, 4),
}


def stepped(te: Any, module: torch.nn.Module, step: int, backward: bool = True) -> torch.Tensor:
    """The output of a training step by the recipe of the module's own package; inputs grow, so that scales change."""
    torch.manual_seed(step)
    x = torch.randn(SIZE, SIZE) * 2**step
    if isinstance(module, te.TransformerLayer | te_modules.TransformerLayer | te.MultiheadAttention | te_modules.MultiheadAttention):
        x = x.view(SIZE // 2, 2, SIZE)
    if type(module).__module__.startswith("transformer_engine"):
        context: Any = te.autocast(recipe=recipe_for(te, "delayed", **OPTIONS))
    else:
        context = fusible.autocast(recipe=fusible.DelayedScaling(**OPTIONS))
    extra = ([SIZE // 2, SIZE // 2],) if "Grouped" in type(module).__name__ else ()
    with context:
        y = module(x, *extra)
    if backward:
        y.float().square().mean().backward()
    return y.detach()
