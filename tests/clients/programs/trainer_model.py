"""A Llama trained by transformers' Trainer, stopped and resumed from its checkpoint. Prints losses and products as JSON.

How precise the products are is said outside, by ``accelerate launch``.
"""

import json
import tempfile
from typing import Any

import torch
import transformer_engine.pytorch as te
from counted import quantized_products
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

SIZE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
STEPS = 4


class Recording(Trainer):
    """Keeps the loss of each step as it is: the Trainer's own log rounds."""

    losses: list[float]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def trainer(seed: int, directory: str) -> Recording:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZE))
    tokens = torch.randint(0, 128, (8, 32), generator=torch.Generator().manual_seed(1)).repeat(STEPS, 1)
    how = {"per_device_train_batch_size": 8, "max_steps": STEPS, "save_steps": STEPS // 2, "learning_rate": 3e-3, "lr_scheduler_type": "constant"}
    arguments = TrainingArguments(directory, report_to=[], disable_tqdm=True, logging_strategy="no", **how)
    made = Recording(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
    made.losses = []
    return made


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, quantized_products() as products:
        whole = trainer(0, directory)
        whole.train()
        resumed = trainer(1, directory)
        resumed.train(resume_from_checkpoint=f"{directory}/checkpoint-{STEPS // 2}")
    linears = sum(isinstance(module, te.Linear) for module in whole.model.modules())
    found = {"losses": whole.losses, "resumed": resumed.losses, "linears": linears, "products": len(products)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
