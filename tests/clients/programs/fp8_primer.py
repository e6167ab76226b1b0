"""First steps in 8 bits: ``fp8_primer.py MODES``, a JSON list. Prints losses and products of each mode and module.

Each module of NVIDIA's trains alone, two micro batches a step: the first makes the 8-bit copies of the weights, which the second uses again.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch as te
from client_recipes import autocast
from counted import quantized_products

WIDTH, LENGTH, BATCH, STEPS = 64, 32, 4, 3
BF16: dict[str, Any] = {"params_dtype": torch.bfloat16}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
MODULES: dict[str, tuple[int, Callable[[], torch.nn.Module]]] = {
    "Linear": (1, lambda: te.Linear(WIDTH, WIDTH, **BF16)),
    "LayerNormLinear": (1, lambda: te.LayerNormLinear(WIDTH, WIDTH, **BF16)),
    "LayerNormMLP": (2, lambda: te.LayerNormMLP(WIDTH, 2 * WIDTH, **BF16)),
    "TransformerLayer": (4, lambda: te.TransformerLayer(WIDTH, 2 * WIDTH, 4, self_attn_mask_type="causal", **NO_DROPOUT, **BF16)),
}
"""By name: how many linear layers it has, and one of it."""


def trained(mode: str, name: str) -> dict[str, Any]:
    linears, make = MODULES[name]
    torch.manual_seed(0)
    module = make()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    batches = torch.randn(2, LENGTH, BATCH, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    losses = []
    with quantized_products() as products:
        for _ in range(STEPS):
            for number, batch in enumerate(batches):
                x = batch.clone().requires_grad_()
                with autocast(mode):
                    y = module(x, is_first_microbatch=number == 0)
                loss = torch.nn.functional.mse_loss(y.float(), batch.float().roll(1, 0))
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "linears": linears, "products": len(products)}


if __name__ == "__main__":
    print(json.dumps([{name: trained(mode, name) for name in MODULES} for mode in json.loads(sys.argv[1])]))
