"""Weights that are 8 bits from the start, fused optimizers and recomputed activations: ``quantized_weights.py MODES``, a JSON list.

Prints of each mode: the losses of a Transformer layer whose parameters are quantized (but in ``bf16``), trained by ``FusedAdam`` with master weights
in fp32, once as it is and once with its activations recomputed; and how many of its parameters are quantized.
"""

import json
import sys
from typing import Any

import torch
import transformer_engine.pytorch as te
from client_recipes import RECIPES, autocast
from counted import quantized_products

WIDTH, LENGTH, BATCH, STEPS = 64, 32, 4, 4


def trained(mode: str, recomputed: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    chosen = RECIPES[mode]
    more = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
    with te.quantized_model_init(enabled=chosen is not None, recipe=chosen() if chosen else None):
        layer = te.TransformerLayer(WIDTH, 2 * WIDTH, 4, fuse_qkv_params=True, params_dtype=torch.bfloat16, **more)
    optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=1e-3, master_weights=True)
    x = torch.randn(LENGTH, BATCH, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16().requires_grad_()
    losses = []
    with quantized_products() as products:
        for _ in range(STEPS):
            with autocast(mode):
                y = te.checkpoint(layer, x, use_reentrant=True) if recomputed else layer(x)
            loss = torch.nn.functional.mse_loss(y.float(), x.detach().float().roll(1, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    quantized = sum(isinstance(parameter, te.QuantizedTensor) for parameter in layer.parameters())
    return {"losses": losses, "linears": 4, "products": len(products), "quantized": quantized}


def of_torch() -> list[list[float]]:
    """The weights that two steps of each optimizer leave, torch's beside NVIDIA's."""
    found = []
    for ours, theirs, more in (
        (te.optimizers.FusedAdam, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
        (te.optimizers.FusedSGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    ):
        for optimizer in (ours, theirs):
            weight = torch.nn.Parameter(torch.linspace(-1, 1, 8, device="cuda"))
            stepping = optimizer([weight], **more)
            for step in range(2):
                weight.grad = torch.linspace(0.5, -0.5, 8, device="cuda") * (step + 1)
                stepping.step()
            found.append(weight.tolist())
    return found


if __name__ == "__main__":
    runs = [{name: trained(mode, name == "recomputed") for name in ("plain", "recomputed")} for mode in json.loads(sys.argv[1])]
    print(json.dumps({"runs": runs, "optimizers": of_torch()}))
