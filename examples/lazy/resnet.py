"""A small ResNet: convolutions, batch norm, pooling, and the same network in 16 bits.

* ``python examples/lazy/resnet.py``
"""

import numpy as np
from seeded_weights import seeded_weights

import fusible.lazy as tp

WIDTHS, CLASSES = (16, 32, 64), 10
SAME = ((1, 1), (1, 1))


class Block(tp.Module):
    """Two convolutions beside the identity, or beside a 1x1 convolution where the shape changes."""

    def __init__(self, inward: int, outward: int, stride: int, dtype: tp.dtype) -> None:
        self.conv1 = tp.Conv(inward, outward, (3, 3), (stride, stride), SAME, bias=False, dtype=dtype)
        self.bn1 = tp.BatchNorm(outward, dtype)
        self.conv2 = tp.Conv(outward, outward, (3, 3), padding=SAME, bias=False, dtype=dtype)
        self.bn2 = tp.BatchNorm(outward, dtype)
        self.downsample = tp.Sequential()
        if stride != 1 or inward != outward:
            self.downsample = tp.Sequential(
                tp.Conv(inward, outward, (1, 1), (stride, stride), bias=False, dtype=dtype),
                tp.BatchNorm(outward, dtype),
            )

    def forward(self, x: tp.Tensor) -> tp.Tensor:
        y = tp.relu(self.bn1(self.conv1(x)))
        return tp.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResNet(tp.Module):
    """Images ``[N, 3, H, W]`` to logits ``[N, CLASSES]``: a stem, one block per width, the mean over what is left, a projection."""

    def __init__(self, dtype: tp.dtype = tp.float32) -> None:
        first, *_, last = WIDTHS
        self.conv1 = tp.Conv(3, first, (3, 3), padding=SAME, bias=False, dtype=dtype)
        self.bn1 = tp.BatchNorm(first, dtype)
        pairs = zip((first, *WIDTHS), WIDTHS, strict=False)
        self.layers = tp.Sequential(*(Block(a, b, 1 if a == b else 2, dtype) for a, b in pairs))
        self.fc = tp.Linear(last, CLASSES, dtype=dtype)

    def forward(self, x: tp.Tensor) -> tp.Tensor:
        x = tp.relu(self.bn1(self.conv1(x)))
        x = tp.maxpool(x, (2, 2), (2, 2))
        return self.fc(tp.mean(self.layers(x), dim=(2, 3)))


def make_model(dtype: tp.dtype = tp.float32, seed: int = 0) -> ResNet:
    model = ResNet(dtype)
    model.load_state_dict(seeded_weights(model, seed))
    return model


def make_image(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, 3, 32, 32)).astype(np.float32)


def main() -> None:
    image = tp.Tensor(make_image())
    logits = {}
    for dtype in (tp.float32, tp.bfloat16):
        model = make_model(dtype)
        forward = tp.compile(model, args=[tp.InputInfo(image.shape, dtype)])
        logits[dtype] = forward(tp.cast(image, dtype))
        probabilities, classes = tp.topk(tp.softmax(tp.cast(logits[dtype], tp.float32), dim=1), 3, dim=1)
        named = ", ".join(f"{c} ({p:.1%})" for c, p in zip(classes.tolist()[0], probabilities.tolist()[0], strict=True))
        size = sum(t.size * t.dtype.itemsize for t in model.state_dict().values())
        print(f"{dtype!s:9} {size / 1024:4.0f} KiB of weights; likeliest classes: {named}")
    wide, narrow = (tp.cast(t, tp.float32) for t in logits.values())
    print(f"16 bits move the logits by at most {float(tp.max(tp.abs(wide - narrow)) / tp.max(tp.abs(wide))):.2%} of the largest")


if __name__ == "__main__":
    main()
