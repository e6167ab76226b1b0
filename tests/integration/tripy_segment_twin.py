"""The network of ``tripy_programs/segment.py`` in torch, with the same names: windows one at a time, rotary positions as complex numbers."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["Segmenter"]

WINDOW, HEADS, MASKS, TABLE = 4, 2, 3, 5


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def pooled(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)


class Mlp(nn.Module):
    def __init__(self, inward: int, hidden: int, outward: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(inward, hidden), nn.Linear(hidden, outward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class HieraBlock(nn.Module):
    def __init__(self, inward: int, outward: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.norm1, self.norm2 = nn.LayerNorm(inward), nn.LayerNorm(outward)
        self.qkv, self.proj, self.mlp = nn.Linear(inward, 3 * outward), nn.Linear(outward, outward), Mlp(outward, 2 * outward, outward)
        self.skip = nn.Linear(inward, outward) if inward != outward else None

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q = q if self.skip is None else pooled(q)
        return self.proj(attend(*(heads(part.flatten(1, 2)) for part in (q, k, v)))).unflatten(1, q.shape[1:3])

    def windowed(self, y: torch.Tensor, height: int, across: int) -> torch.Tensor:
        side = self.window
        rows, columns = (math.ceil(n / side) for n in y.shape[1:3])
        y = F.pad(y, (0, 0, 0, columns * side - y.shape[2], 0, rows * side - y.shape[1]))
        tiles = [
            torch.cat([self.attention(y[:, r * side : (r + 1) * side, c * side : (c + 1) * side]) for c in range(columns)], 2) for r in range(rows)
        ]
        return torch.cat(tiles, 1)[:, :height, :across]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        if self.skip is not None:
            x = pooled(self.skip(y))
        x = x + (self.windowed(y, *x.shape[1:3]) if self.window else self.attention(y))
        return x + self.mlp(self.norm2(x))


class ImageEncoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.patch, self.table = nn.Conv2d(3, width, 7, 4, 3), nn.Parameter(torch.zeros(1, width, TABLE, TABLE))
        self.fine = nn.ModuleList([HieraBlock(width, width, WINDOW)])
        self.coarse = nn.ModuleList([HieraBlock(width, 2 * width, WINDOW), HieraBlock(2 * width, 2 * width, 0)])
        self.lateral = nn.ModuleList([nn.Conv2d(width, 2 * width, 1), nn.Conv2d(2 * width, 2 * width, 1)])

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.patch(image)
        x = (x + F.interpolate(self.table, x.shape[2:], mode="bicubic")).permute(0, 2, 3, 1)
        for block in self.fine:
            x = block(x)
        fine = self.lateral[0](x.permute(0, 3, 1, 2))
        for block in self.coarse:
            x = block(x)
        coarse = self.lateral[1](x.permute(0, 3, 1, 2))
        return fine + F.interpolate(coarse, fine.shape[2:], mode="nearest"), coarse


def rotated(x: torch.Tensor, height: int, across: int, times: int = 1) -> torch.Tensor:
    quarter = x.shape[3] // 4
    rates = torch.exp(torch.arange(quarter, dtype=x.dtype) * (-math.log(100.0) / quarter))
    rows, columns = torch.meshgrid(torch.arange(height, dtype=x.dtype), torch.arange(across, dtype=x.dtype), indexing="ij")
    angles = torch.cat([rows.reshape(-1, 1) * rates, columns.reshape(-1, 1) * rates], 1).repeat(times, 1)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten(-2)


class Projections(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self.out(attend(heads(self.q(x)), heads(self.k(keys)), heads(self.v(values))))


class MemoryAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross, self.mlp = Projections(width), Projections(width), Mlp(width, 2 * width, width)

    def forward(self, features: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        height, across = features.shape[2:]
        x = features.flatten(2).transpose(1, 2)
        for norm, part, source in ((self.norm1, self.own, None), (self.norm2, self.cross, memory)):
            y = norm(x)
            frames, source = (1, y) if source is None else (len(source), source.flatten(0, 1)[None])
            q, k = rotated(heads(part.q(y)), height, across), rotated(heads(part.k(source)), height, across, frames)
            x = x + part.out(attend(q, k, heads(part.v(source))))
        x = x + self.mlp(self.norm3(x))
        return x.transpose(1, 2).reshape(features.shape)


class MaskDecoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.labels, self.rates = nn.Embedding(1 + MASKS, width), nn.Embedding(2, width), nn.Linear(2, width // 2, bias=False)
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.LayerNorm(width) for _ in range(4))
        self.own, self.to_image, self.to_tokens = Projections(width), Projections(width), Projections(width)
        self.mlp, self.scores = Mlp(width, 2 * width, width), Mlp(width, width, MASKS)
        self.grow, self.hyper = nn.ConvTranspose2d(width, width, 2, 2), nn.ModuleList(Mlp(width, width, width) for _ in range(MASKS))

    def places(self, points: torch.Tensor) -> torch.Tensor:
        angles = self.rates(2 * points - 1) * (2 * math.pi)
        return torch.cat([angles.sin(), angles.cos()], -1)

    def forward(self, coarse: torch.Tensor, fine: torch.Tensor, points: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        height, across = coarse.shape[2:]
        tokens = torch.cat([self.tokens.weight[None], self.places(points) + self.labels(labels)], 1)
        centers = [(torch.arange(n, dtype=coarse.dtype) + 0.5) / n for n in (height, across)]
        places = self.places(torch.stack(torch.meshgrid(*centers, indexing="ij"), -1)).flatten(0, 1)[None]
        image = coarse.flatten(2).transpose(1, 2)
        x = self.norm1(tokens + self.own(tokens, tokens, tokens))
        x = self.norm2(x + self.to_image(x, image + places, image))
        x = self.norm3(x + self.mlp(x))
        image = self.norm4(image + self.to_tokens(image + places, x + tokens, x))
        grown = F.gelu(self.grow(image.transpose(1, 2).reshape(coarse.shape)) + fine)
        weights = torch.stack([hyper(x[:, 1 + i]) for i, hyper in enumerate(self.hyper)], 1)
        return torch.einsum("bmc,bchw->bmhw", weights, grown), torch.sigmoid(self.scores(x[:, 0]))


class MemoryEncoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.shrink, self.fuse, self.out = nn.Conv2d(1, width, 2, 2), nn.Conv2d(width, width, 3, 1, 1, groups=width), nn.Conv2d(width, width, 1)

    def forward(self, coarse: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.out(F.gelu(self.fuse(coarse + self.shrink(torch.sigmoid(mask))))).flatten(2).transpose(1, 2)


class Segmenter(nn.Module):
    """``forward`` gives the masks and scores of each frame of a video, which remembers the best mask of every frame before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder, self.attention = ImageEncoder(width), MemoryAttention(2 * width)
        self.decoder, self.memory = MaskDecoder(2 * width), MemoryEncoder(2 * width)

    def forward(self, video: list[torch.Tensor], points: torch.Tensor, labels: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        bank: list[torch.Tensor] = []
        results = []
        for frame in video:
            fine, coarse = self.encoder(frame)
            if bank:
                coarse = self.attention(coarse, torch.cat(bank))
            masks, scores = self.decoder(coarse, fine, points, labels)
            best = int(scores.argmax())
            bank.append(self.memory(coarse, masks[:, best : best + 1]))
            results.append((masks, scores))
        return results
