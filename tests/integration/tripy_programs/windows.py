"""A windowed image encoder written for Tripy: images of any size, padded to whole windows whose number is ``size / int``.

It knows nothing of Fusible: ``fusible run --tripy windows.py OUT`` runs it, and OUT holds the weights, the images and what came of them.
"""

import math
import sys

import numpy as np
import nvtripy as tp

WINDOW, WIDTH, HEADS, CLASSES = 4, 16, 2, 3
SIZES = ((8, 8), (10, 13), (5, 16))


def partition(x):
    batch, height, width, channels = x.shape
    below, beside = (WINDOW - height % WINDOW) % WINDOW, (WINDOW - width % WINDOW) % WINDOW
    x = tp.pad(x, [(0, 0), (0, below), (0, beside), (0, 0)])
    rows, columns = (height + below) / WINDOW, (width + beside) / WINDOW
    x = tp.permute(tp.reshape(x, (batch, rows, WINDOW, columns, WINDOW, channels)), (0, 1, 3, 2, 4, 5))
    return tp.reshape(x, (batch * rows * columns, WINDOW * WINDOW, channels)), (rows, columns)


def unpartition(windows, grid, shape):
    batch, height, width, channels = shape
    rows, columns = grid
    x = tp.permute(tp.reshape(windows, (batch, rows, columns, WINDOW, WINDOW, channels)), (0, 1, 3, 2, 4, 5))
    return tp.reshape(x, (batch, rows * WINDOW, columns * WINDOW, channels))[:, :height, :width, :]


class WindowAttention(tp.Module):
    def __init__(self):
        super().__init__()
        self.norm = tp.LayerNorm(WIDTH)
        self.qkv = tp.Linear(WIDTH, 3 * WIDTH)
        self.proj = tp.Linear(WIDTH, WIDTH)

    def forward(self, x):
        windows, grid = partition(self.norm(x))
        qkv = tp.reshape(self.qkv(windows), (windows.shape[0], WINDOW * WINDOW, 3, HEADS, WIDTH // HEADS))
        q, k, v = (tp.transpose(qkv[:, :, i], 1, 2) for i in range(3))
        weights = tp.softmax((q @ tp.transpose(k, -2, -1)) / math.sqrt(WIDTH / HEADS), dim=-1)
        mixed = tp.reshape(tp.transpose(weights @ v, 1, 2), (windows.shape[0], WINDOW * WINDOW, WIDTH))
        return x + unpartition(self.proj(mixed), grid, x.shape)


class Encoder(tp.Module):
    def __init__(self):
        super().__init__()
        self.patch = tp.Conv(3, WIDTH, (3, 3), padding=[(1, 1), (1, 1)])
        self.blocks = [WindowAttention(), WindowAttention()]
        self.neck = tp.Conv(WIDTH, CLASSES, (1, 1))

    def forward(self, image):
        x = tp.permute(self.patch(image), (0, 2, 3, 1))
        for block in self.blocks:
            x = block(x)
        fine = self.neck(tp.permute(x, (0, 3, 1, 2)))
        pooled = tp.mean(fine, dim=(2, 3), keepdim=True)
        mask = tp.where(fine > pooled, fine, tp.full(fine.shape, tp.min(fine)))
        return mask, tp.flatten(pooled, 1)


def main():
    model = Encoder()
    numbers = np.random.default_rng(3)
    weights = {}
    for name, parameter in model.state_dict().items():
        weights[name] = (numbers.standard_normal(tuple(parameter.shape)) * 0.3 + ("norm.weight" in name)).astype(np.float32)
    model.load_state_dict({name: tp.Tensor(value) for name, value in weights.items()})
    height, width = tp.NamedDimension("height", 4, 8, 32), tp.NamedDimension("width", 4, 8, 32)
    run = tp.compile(model, args=[tp.InputInfo((1, 3, height, width), dtype=tp.float32)])
    found = {}
    for i, size in enumerate(SIZES):
        image = numbers.standard_normal((1, 3, *size)).astype(np.float32)
        mask, pooled = run(tp.Tensor(image).eval())
        assert mask.shape == (1, CLASSES, *size) and pooled.shape == (1, CLASSES)
        found |= {f"image{i}": image, f"mask{i}": np.from_dlpack(mask), f"pooled{i}": np.from_dlpack(pooled)}
    print("images:", len(SIZES))
    np.savez(sys.argv[1], **weights, **found)


if __name__ == "__main__":
    main()
