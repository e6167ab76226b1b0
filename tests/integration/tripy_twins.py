"""The networks of ``tripy_programs`` in torch, with the same names."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["Diffusion", "ResNet50"]


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


class Attention(nn.Module):
    def __init__(self, width: int, source: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.to_q, self.to_out = nn.Linear(width, width, bias=bias), nn.Linear(width, width)
        self.to_k, self.to_v = (nn.Linear(source or width, width, bias=bias) for _ in range(2))

    def forward(self, x: torch.Tensor, source: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
        source = x if source is None else source
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.to_q(x), self.to_k(source), self.to_v(source)))
        return self.to_out(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))


class TextLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, bias=True)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), causal=True)
        y = self.fc1(self.norm2(x))
        return x + self.fc2(y * torch.sigmoid(1.702 * y))


class TextEncoder(nn.Module):
    def __init__(self, words: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers, self.norm = nn.ModuleList(TextLayer(width) for _ in range(2)), nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Residual(nn.Module):
    def __init__(self, inward: int, outward: int, time: int = 0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inward), nn.GroupNorm(4, outward)
        self.conv1, self.conv2 = nn.Conv2d(inward, outward, 3, 1, 1), nn.Conv2d(outward, outward, 3, 1, 1)
        self.time = nn.Linear(time, outward) if time else None
        self.skip = nn.Conv2d(inward, outward, 1) if inward != outward else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        if self.time is not None and time is not None:
            y = y + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class SpatialTransformer(nn.Module):
    def __init__(self, width: int, text: int) -> None:
        super().__init__()
        self.norm, self.proj_in, self.proj_out = nn.GroupNorm(4, width), nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.self_attention, self.cross_attention = Attention(width), Attention(width, text)
        self.gate, self.out = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        y = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2)
        y = y + self.self_attention(self.norm1(y))
        y = y + self.cross_attention(self.norm2(y), text)
        value, gate = self.gate(self.norm3(y)).chunk(2, -1)
        y = y + self.out(value * F.gelu(gate))
        return x + self.proj_out(y.transpose(1, 2).reshape(x.shape))


class Upsample(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class UNet(nn.Module):
    def __init__(self, width: int, latent: int, text: int) -> None:
        super().__init__()
        self.width, time = width, 4 * width
        self.time1, self.time2 = nn.Linear(width, time), nn.Linear(time, time)
        self.conv_in, self.shrink = nn.Conv2d(latent, width, 3, 1, 1), nn.Conv2d(width, width, 3, 2, 1)
        self.down, self.down_attention = Residual(width, width, time), SpatialTransformer(width, text)
        self.middle1, self.middle_attention = Residual(width, 2 * width, time), SpatialTransformer(2 * width, text)
        self.middle2, self.grow = Residual(2 * width, 2 * width, time), Upsample(2 * width)
        self.up, self.up_attention = Residual(3 * width, width, time), SpatialTransformer(width, text)
        self.norm_out, self.conv_out = nn.GroupNorm(4, width), nn.Conv2d(width, latent, 3, 1, 1)

    def forward(self, latents: torch.Tensor, timestep: float, text: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        places = torch.arange(half, dtype=latents.dtype)
        angles = timestep * torch.exp(places * (-math.log(10000.0) / half)).expand(len(latents), half)
        time = self.time2(F.silu(self.time1(torch.cat([angles.cos(), angles.sin()], 1))))
        fine = self.down_attention(self.down(self.conv_in(latents), time), text)
        coarse = self.grow(self.middle2(self.middle_attention(self.middle1(self.shrink(fine), time), text), time))
        return self.conv_out(F.silu(self.norm_out(self.up_attention(self.up(torch.cat([coarse, fine], 1), time), text))))


class PixelAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.q, self.k, self.v, self.out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(self.norm(x)).flatten(2).transpose(1, 2) for part in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class Decoder(nn.Module):
    def __init__(self, width: int, latent: int) -> None:
        super().__init__()
        self.post, self.conv_in = nn.Conv2d(latent, latent, 1), nn.Conv2d(latent, 2 * width, 3, 1, 1)
        self.middle1, self.attention, self.grow = Residual(2 * width, 2 * width), PixelAttention(2 * width), Upsample(2 * width)
        self.up, self.norm_out, self.conv_out = Residual(2 * width, width), nn.GroupNorm(4, width), nn.Conv2d(width, 3, 3, 1, 1)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        x = self.grow(self.attention(self.middle1(self.conv_in(self.post(latents / 0.18215)))))
        return self.conv_out(F.silu(self.norm_out(self.up(x))))


class Diffusion(nn.Module):
    """``forward`` gives the image after each of ``steps`` (timesteps), by a deterministic scheduler and guidance."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.text, self.unet, self.decoder = TextEncoder(50, 12, 16), UNet(width, 4, 16), Decoder(width, 4)

    def forward(self, tokens: torch.Tensor, latents: torch.Tensor, steps: tuple[int, ...], guidance: float) -> list[torch.Tensor]:
        kept = torch.cumprod(1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2, 0).to(latents.dtype)
        alphas = [*(kept[t] for t in steps), torch.ones((), dtype=latents.dtype)]
        text, images = self.text(tokens), []
        for i, t in enumerate(steps):
            without, with_text = self.unet(latents.repeat(2, 1, 1, 1), float(t), text)
            guided = torch.lerp(without, with_text, guidance)[None]
            clean = (latents - (1 - alphas[i]).sqrt() * guided) / alphas[i].sqrt()
            latents = alphas[i + 1].sqrt() * clean + (1 - alphas[i + 1]).sqrt() * guided
            images.append(self.decoder(latents))
        return images
