"""A small network trained by Lightning Fabric: ``fabric_model.py MODES``, a JSON list. Prints losses and products of each."""

import json
import sys
import warnings
from typing import Any

import torch
import transformer_engine.pytorch as te
from client_recipes import RECIPES
from counted import quantized_products
from lightning.fabric import Fabric
from lightning.fabric.plugins import TransformerEnginePrecision

warnings.filterwarnings("ignore", module="lightning")


def trained(mode: str) -> dict[str, Any]:
    how: dict[str, Any] = {"precision": "bf16-true"}
    if mode != "bf16":
        how = {"plugins": TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=RECIPES[mode]())}
    fabric = Fabric(accelerator="gpu", devices=1, **how)
    fabric.seed_everything(0, verbose=False)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    net = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=3e-3))
    data = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=32, pin_memory=True))
    losses = []
    with quantized_products() as products:
        for _ in range(4):
            for batch in loader:
                loss = torch.nn.functional.mse_loss(net(batch).float(), batch.float())
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    linears = sum(isinstance(module, te.Linear) for module in net.modules())
    return {"losses": losses, "linears": linears, "products": len(products)}


if __name__ == "__main__":
    print(json.dumps([trained(mode) for mode in json.loads(sys.argv[1])]))
