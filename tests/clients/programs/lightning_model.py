"""A small network trained by Lightning's Trainer: ``lightning_model.py ACCELERATOR PRECISION``. Prints losses and products as JSON."""

import json
import logging
import sys
import warnings

import lightning
import torch
import transformer_engine.pytorch as te
from counted import quantized_products

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")
LOSSES: list[float] = []


class Network(lightning.LightningModule):
    """Learns to give back what it gets."""

    def __init__(self) -> None:
        super().__init__()
        layers = (torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[0])
        LOSSES.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    accelerator, precision = sys.argv[1:]
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 32))
    loader = torch.utils.data.DataLoader(data, batch_size=16, pin_memory=True)
    network = Network()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=5, accelerator=accelerator, devices=1, precision=precision, **quiet)
    with quantized_products() as products:
        trainer.fit(network, loader)
    linears = sum(isinstance(module, te.Linear) for module in network.modules())
    print(json.dumps({"losses": LOSSES, "linears": linears, "products": len(products)}))


if __name__ == "__main__":
    main()
