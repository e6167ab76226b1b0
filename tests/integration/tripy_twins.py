"""The networks of ``tripy_programs`` in torch, with the same names."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["ResNet50"]


class Bottleneck(nn.Module):
    def __init__(self, inward: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inward, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample = nn.Sequential()
        if stride != 1 or inward != 4 * width:
            self.downsample = nn.Sequential(nn.Conv2d(inward, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet50(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.layers = nn.ModuleList()
        inward = width
        for i, depth in enumerate((3, 4, 6, 3)):
            blocks = []
            for j in range(depth):
                blocks.append(Bottleneck(inward, width * 2**i, 2 if i and not j else 1))
                inward = 4 * width * 2**i
            self.layers.append(nn.Sequential(*blocks))
        self.pool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(inward, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(images))), 3, 2, 1)
        for layer in self.layers:
            x = layer(x)
        return self.fc(self.pool(x).flatten(1))
