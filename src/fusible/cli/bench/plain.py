"""The demo's GPT and a decoder in plain torch, in bfloat16."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusible.cli.training.options import TrainOptions

__all__ = ["DecoderShape", "PlainDecoder", "PlainGPT", "Weights"]

_BF16 = torch.bfloat16


def _turns(positions: int, width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, ``[positions, width]``."""
    angles = torch.outer(torch.arange(positions), base ** (-torch.arange(0, width, 2) / width))
    both = torch.cat((angles, angles), -1)
    return both.cos().to(_BF16), both.sin().to(_BF16)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.qkv, self.project = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.between, self.up, self.down = nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """The model of ``fusible train``: int64 ``[batch, seq]`` -> fp32 ``[batch, seq, 256]``."""

    def __init__(self, options: TrainOptions) -> None:
        super().__init__()
        hidden = options.hidden
        self.embedding = nn.Embedding(256, hidden)
        self.blocks = nn.ModuleList(_Block(hidden, options.heads) for _ in range(options.layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 256)
        cos, sin = _turns(options.seq_len, hidden // options.heads, 10000.0)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x)).float()


class DecoderShape(NamedTuple):
    """Norm, grouped-query attention, norm, SwiGLU; ``layers`` times."""

    layers: int
    hidden: int
    heads: int
    groups: int
    inner: int
    vocabulary: int
    base: float = 500000.0
    eps: float = 1e-5

    @property
    def width(self) -> int:
        """Columns of a head."""
        return self.hidden // self.heads

    @property
    def qkv(self) -> int:
        """Columns of q, k and v side by side."""
        return self.hidden + 2 * self.groups * self.width


class Weights:
    """The same bfloat16 weights for everyone who asks in the same order: uniform, of variance ``1 / columns``."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, deviation: float | None = None) -> Tensor:
        """``[rows, columns]``, of standard deviation ``deviation`` where it is given."""
        bound = 3**0.5 * (columns**-0.5 if deviation is None else deviation)
        return torch.empty(rows, columns, dtype=_BF16).uniform_(-bound, bound, generator=self._generator)


class _Layer:
    def __init__(self, shape: DecoderShape, weights: Weights) -> None:
        self.shape = shape
        self.gammas = torch.ones(2, shape.hidden, dtype=_BF16)
        self.qkv, self.project = weights.matrix(shape.qkv, shape.hidden), weights.matrix(shape.hidden, shape.hidden)
        self.up, self.down = weights.matrix(2 * shape.inner, shape.hidden), weights.matrix(shape.hidden, shape.inner)

    def __call__(self, x: Tensor, cache: Tensor, start: int, cos: Tensor, sin: Tensor) -> Tensor:
        """``x [batch, tokens, hidden]`` from position ``start`` on; ``cache [2, batch, groups, capacity, width]``."""
        batch, tokens, hidden = x.shape
        heads, groups, width, end = self.shape.heads, self.shape.groups, self.shape.width, start + x.shape[1]
        mixed = F.linear(F.rms_norm(x, (hidden,), self.gammas[0], self.shape.eps), self.qkv)
        q, k, v = mixed.view(batch, tokens, -1, width).transpose(1, 2).split((heads, groups, groups), 1)
        cache[0, :, :, start:end], cache[1, :, :, start:end] = _rotate(k, cos[start:end], sin[start:end]), v
        k, v = cache[:, :, :, :end]
        seen = F.scaled_dot_product_attention(_rotate(q, cos[start:end], sin[start:end]), k, v, is_causal=tokens > 1, enable_gqa=True)
        x = x + F.linear(seen.transpose(1, 2).reshape(batch, tokens, hidden), self.project)
        gate, linear = F.linear(F.rms_norm(x, (hidden,), self.gammas[1], self.shape.eps), self.up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * linear, self.down)


class PlainDecoder:
    """A decoder in bfloat16 whose cache is allocated beforehand; ``start`` it, then ``step`` it."""

    def __init__(self, shape: DecoderShape) -> None:
        weights = Weights()
        self.shape = shape
        self.layers = [_Layer(shape, weights) for _ in range(shape.layers)]
        self.gamma = torch.ones(shape.hidden, dtype=_BF16)
        self.embedding, self.head = weights.matrix(shape.vocabulary, shape.hidden, 1.0), weights.matrix(shape.vocabulary, shape.hidden)
        self._caches, self._length = torch.empty(0), 0
        self._cos, self._sin = _turns(1, 2, 1.0)

    def start(self, batch: int, capacity: int) -> None:
        """Begin ``batch`` sequences."""
        shape = self.shape
        self._caches = torch.zeros(shape.layers, 2, batch, shape.groups, capacity, shape.width, dtype=_BF16)
        self._cos, self._sin = _turns(capacity, shape.width, shape.base)
        self._length = 0

    def step(self, tokens: Tensor) -> Tensor:
        """int64 ``[batch, tokens]``: the logits ``[batch, vocabulary]`` of what follows. Several tokens are taken at the beginning only."""
        x = F.embedding(tokens, self.embedding)
        for layer, cache in zip(self.layers, self._caches, strict=True):
            x = layer(x, cache, self._length, self._cos, self._sin)
        self._length += tokens.shape[1]
        return F.linear(F.rms_norm(x[:, -1], (self.shape.hidden,), self.gamma, self.shape.eps), self.head)

    @property
    def weights(self) -> list[Tensor]:
        """The weights of matrix products, in the order of a step."""
        return [weight for layer in self.layers for weight in (layer.qkv, layer.project, layer.up, layer.down)] + [self.head]

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x`` times one of the weights."""
        return F.linear(x, weight)

    @property
    def nbytes(self) -> int:
        """The memory of weights and cache."""
        norms = [self.gamma, *(layer.gammas for layer in self.layers)]
        return sum(tensor.nbytes for tensor in [*self.weights, self.embedding, *norms, self._caches])
