"""Ten training steps of a Transformer layer, by the documented interface of Transformer Engine and for its default device, a GPU.

* ``python examples/te_transformer_layer.py --recipe mxfp8``
* ``fusible run --device cpu examples/te_transformer_layer.py --recipe mxfp8``
"""

import argparse

import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe

RECIPES = {
    "bf16": None,
    "delayed": recipe.DelayedScaling,
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}
SEQUENCE, BATCH, HIDDEN, FFN, HEADS = 32, 4, 128, 256, 4


def make_layer(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return te.TransformerLayer(
        HIDDEN, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="causal", params_dtype=torch.bfloat16
    )


def make_batch(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and what the layer shall make of them: the sequence one step later."""
    torch.manual_seed(seed)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, device="cuda", dtype=torch.bfloat16)
    return x, x.roll(1, dims=0)


def train(layer: torch.nn.Module, recipe_name: str, steps: int) -> list[float]:
    chosen = RECIPES[recipe_name]
    optimizer = te.optimizers.FusedAdam(layer.parameters(), lr=1e-3, master_weights=True)
    x, target = make_batch()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with te.autocast(enabled=chosen is not None, recipe=chosen() if chosen else None):
            y = layer(x)
        loss = torch.nn.functional.mse_loss(y.float(), target.float())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", choices=RECIPES, default="bf16")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    for step, loss in enumerate(train(make_layer(), options.recipe, options.steps), 1):
        print(f"step {step:2d}  loss {loss:.4f}")
