"""A ResNet-50 written for Tripy: all of its 53 convolutions, batches of any size through one executable, one image eagerly.

It knows nothing of Fusible: ``fusible run --tripy resnet50.py OUT`` runs it, and OUT holds the weights, the images and the logits. ``WIDTH`` and
``SIDE`` may follow OUT: 8 channels and images of 32 x 32 unless given, where the published network has 64 and 224.
"""

import sys

import numpy as np
import nvtripy as tp

DEPTHS, EXPANSION, CLASSES, BATCHES = (3, 4, 6, 3), 4, 10, (2, 3)


def convolution(inward, outward, side, stride=1):
    edge = side // 2
    return tp.Conv(inward, outward, (side, side), padding=[(edge, edge)] * 2, stride=(stride, stride), bias=False)


class Bottleneck(tp.Module):
    def __init__(self, inward, width, stride):
        super().__init__()
        self.conv1, self.bn1 = convolution(inward, width, 1), tp.BatchNorm(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), tp.BatchNorm(width)
        self.conv3, self.bn3 = convolution(width, EXPANSION * width, 1), tp.BatchNorm(EXPANSION * width)
        self.downsample = None
        if stride != 1 or inward != EXPANSION * width:
            self.downsample = tp.Sequential(convolution(inward, EXPANSION * width, 1, stride), tp.BatchNorm(EXPANSION * width))

    def forward(self, x):
        y = tp.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(tp.relu(self.bn2(self.conv2(y)))))
        return tp.relu(y + (self.downsample(x) if self.downsample is not None else x))


class ResNet(tp.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = convolution(3, width, 7, 2), tp.BatchNorm(width)
        self.layers, inward = [], width
        for i, depth in enumerate(DEPTHS):
            blocks = []
            for j in range(depth):
                blocks.append(Bottleneck(inward, width << i, 2 if i and not j else 1))
                inward = EXPANSION * width << i
            self.layers.append(tp.Sequential(*blocks))
        self.fc = tp.Linear(inward, CLASSES)

    def forward(self, images):
        x = tp.relu(self.bn1(self.conv1(images)))
        x = tp.maxpool(x, kernel_dims=(3, 3), stride=(2, 2), padding=((1, 1), (1, 1)))
        for layer in self.layers:
            x = layer(x)
        # The adaptive pool to 1 x 1: a mean over whatever is left.
        return self.fc(tp.flatten(tp.mean(x, dim=(2, 3), keepdim=True), 1))


def seeded(model, numbers):
    """Numbers for every parameter, of a size that keeps the activations'."""
    values = {}
    for name, parameter in model.state_dict().items():
        shape, owner = tuple(parameter.shape), name.split(".")[-2]
        if name.endswith("running_var") or (len(shape) == 1 and name.endswith("weight")):
            value = numbers.uniform(0.5, 1.5, shape) * (0.3 if owner == "bn3" and name.endswith("weight") else 1.0)
        else:
            value = numbers.standard_normal(shape) * (2.0 / np.prod(shape[1:])) ** 0.5 if len(shape) > 1 else numbers.standard_normal(shape) * 0.1
        values[name] = value.astype(np.float32)
    model.load_state_dict({name: tp.Tensor(value) for name, value in values.items()})
    return values


def main():
    width, side = (int(n) for n in (*sys.argv[2:], 8, 32)[:2])
    model, numbers = ResNet(width), np.random.default_rng(50)
    weights = seeded(model, numbers)
    run = tp.compile(model, args=[tp.InputInfo(((1, 2, 8), 3, side, side), dtype=tp.float32)])
    found = {}
    for batch in BATCHES:
        images = numbers.standard_normal((batch, 3, side, side)).astype(np.float32)
        logits = run(tp.copy(tp.Tensor(images), tp.device("gpu")).eval())
        assert logits.shape == (batch, CLASSES)
        found |= {f"images{batch}": images, f"logits{batch}": np.from_dlpack(logits)}
    alone = model(tp.Tensor(found["images3"][:1])).eval()
    print("class:", tp.argmax(alone, dim=1).tolist(), "of", len(BATCHES), "batches")
    np.savez(sys.argv[1], **weights, **found, eager=np.from_dlpack(alone))


if __name__ == "__main__":
    main()
