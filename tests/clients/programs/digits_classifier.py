"""A classifier of handwritten digits in the shape of the usual first example: ``digits_classifier.py [--use-te] [--use-fp8] [--use-fp8-infer]``.

The digits are drawn from a seed: each is its class's pattern of strokes, moved and with noise. Prints losses, products and accuracy as JSON.
"""

import argparse
import json

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from counted import quantized_products

CLASSES, SIDE = 10, 12


class Digits(torch.utils.data.Dataset):
    """Images [1, SIDE, SIDE] and their classes."""

    def __init__(self, count: int, seed: int) -> None:
        strokes = torch.randn(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(7))
        draws = torch.Generator().manual_seed(seed)
        self.classes = torch.randint(0, CLASSES, (count,), generator=draws)
        self.images = strokes[self.classes] + 0.3 * torch.randn(count, 1, SIDE, SIDE, generator=draws)

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.classes[index]


class Classifier(torch.nn.Module):
    """Two convolutions, and two linear layers whose sizes are whole blocks of 8 bits: 16 classes, of which 10 occur."""

    def __init__(self, use_te: bool) -> None:
        super().__init__()
        linear = te.Linear if use_te else torch.nn.Linear
        self.first = torch.nn.Conv2d(1, 8, 3)
        self.second = torch.nn.Conv2d(8, 16, 3)
        self.hidden = linear(16 * 16, 128)
        self.head = linear(128, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.second(F.relu(self.first(x)))), 2)
        return self.head(F.relu(self.hidden(x.flatten(1))))


def train(model: torch.nn.Module, loader: torch.utils.data.DataLoader, device: torch.device, use_fp8: bool) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    losses = []
    for images, classes in loader:
        images, classes = images.to(device, non_blocking=True), classes.to(device, non_blocking=True)
        optimizer.zero_grad()
        with te.autocast(enabled=use_fp8):
            scores = model(images)
        loss = F.cross_entropy(scores, classes)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def accuracy(model: torch.nn.Module, loader: torch.utils.data.DataLoader, device: torch.device, use_fp8: bool) -> float:
    model.eval()
    right = total = 0
    with torch.inference_mode(), te.autocast(enabled=use_fp8):
        for images, classes in loader:
            right += (model(images.to(device)).argmax(-1) == classes.to(device)).sum().item()
            total += len(classes)
    return right / total


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--use-te", "--use-fp8", "--use-fp8-infer"):
        parser.add_argument(name, action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Classifier(options.use_te).to(device)
    how = {"pin_memory": True, "num_workers": 1}
    with quantized_products() as products:
        losses = train(model, torch.utils.data.DataLoader(Digits(1280, 1), batch_size=32, shuffle=True, **how), device, options.use_fp8)
    with quantized_products() as at_inference:
        right = accuracy(model, torch.utils.data.DataLoader(Digits(128, 2), batch_size=64, **how), device, options.use_fp8_infer)
    found = {"losses": losses, "linears": 2 * options.use_te, "products": len(products), "inference": len(at_inference), "accuracy": right}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
