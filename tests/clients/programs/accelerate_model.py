"""A causal language model of transformers trained by Accelerate: ``accelerate_model.py MODEL MODE``. Prints losses and products as JSON."""

import json
import sys

import torch
import transformer_engine.pytorch as te
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs
from counted import quantized_products
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Qwen3Config

SIZE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZE |= {"num_attention_heads": 4, "max_position_embeddings": 64}
MODELS = {
    "llama": lambda: LlamaConfig(**SIZE, num_key_value_heads=2),
    "gpt2": lambda: GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "qwen3": lambda: Qwen3Config(**SIZE, num_key_value_heads=2, head_dim=16),
    "mixtral": lambda: MixtralConfig(**SIZE, num_key_value_heads=2, num_local_experts=4),
}
RECIPES = {
    "delayed": {"fp8_format": "HYBRID"},
    "e4m3": {"fp8_format": "E4M3"},
    "mxfp8": {"fp8_format": "E4M3", "use_mxfp8_block_scaling": True},
}


def main() -> None:
    model_name, mode = sys.argv[1:]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[model_name]())
    handlers = [TERecipeKwargs(**RECIPES[mode])] if mode in RECIPES else []
    accelerator = Accelerator(mixed_precision="fp8" if handlers else "bf16", kwargs_handlers=handlers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, 128, (32, 32), generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(tokens, batch_size=8, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    linears = sum(isinstance(module, te.Linear) for module in model.modules())
    losses = []
    with quantized_products() as products:
        for _ in range(3):
            for batch in loader:
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    if accelerator.is_main_process:
        print(json.dumps({"losses": losses, "linears": linears, "products": len(products)}))


if __name__ == "__main__":
    main()
