"""The networks of ``examples/lazy`` in torch, with the same names."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F


class MLP(nn.Module):
    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, hidden), nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class ResidualBlock(nn.Module):
    def __init__(self, inward: int, outward: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inward, outward, 3, stride, 1, bias=False), nn.BatchNorm2d(outward)
        self.conv2, self.bn2 = nn.Conv2d(outward, outward, 3, 1, 1, bias=False), nn.BatchNorm2d(outward)
        self.downsample = nn.Sequential()
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inward, outward, 1, stride, bias=False), nn.BatchNorm2d(outward))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0])
        self.layers = nn.Sequential(
            *(ResidualBlock(a, b, 1 if a == b else 2) for a, b in zip((widths[0], *widths), widths, strict=False)),
        )
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        return self.fc(self.layers(x).mean((2, 3)))


class TimedBlock(nn.Module):
    def __init__(self, groups: int, time: int, inward: int, outward: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, inward), nn.GroupNorm(groups, outward)
        self.conv1, self.conv2 = nn.Conv2d(inward, outward, 3, 1, 1), nn.Conv2d(outward, outward, 3, 1, 1)
        self.time = nn.Linear(time, outward)
        self.skip = nn.Conv2d(inward, outward, 1) if inward != outward else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class ImageAttention(nn.Module):
    def __init__(self, groups: int, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(groups, width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x).flatten(2).transpose(1, 2)).chunk(3, 2)
        return x + self.out(F.scaled_dot_product_attention(q, k, v)).transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    def __init__(self, channels: int, width: int, groups: int, time: int) -> None:
        super().__init__()
        self.frequencies = torch.exp(torch.arange(time // 2, dtype=torch.float64) * (-math.log(10000.0) / (time // 2)))
        self.time = nn.Sequential(nn.Linear(time, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(channels, width, 3, 1, 1)
        self.down = TimedBlock(groups, time, width, width)
        self.shrink = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = nn.ModuleList(TimedBlock(groups, time, 2 * width, 2 * width) for _ in range(2))
        self.attention = ImageAttention(groups, 2 * width)
        self.grow = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.up = TimedBlock(groups, time, 2 * width, width)
        self.norm, self.head = nn.GroupNorm(groups, width), nn.Conv2d(width, channels, 3, 1, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        angles = t[:, None] * self.frequencies.to(t.dtype)
        time = self.time(torch.cat([angles.cos(), angles.sin()], 1))
        fine = self.down(self.stem(x), time)
        coarse = self.middle[1](self.attention(self.middle[0](self.shrink(fine), time)), time)
        return self.head(F.silu(self.norm(self.up(torch.cat([self.grow(coarse), fine], 1), time))))
