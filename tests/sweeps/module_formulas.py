"""What modules and operations compute, as formulas on float64 tensors that say where they round (``rounding_noise``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from rounding_noise import Noise
from torch import Tensor

__all__ = [
    "GATES", "PLAIN", "attention", "clamped", "cross_attention",
    "gated", "grouped", "l2norm", "latent_attention", "layernorm", "linear", "rmsnorm", "scaled", "shifted", "situ",
    "tanh_srelu",
]  # fmt: skip

Formula = Callable[[Noise, Tensor], Tensor]


def _gelu(n: Noise, x: Tensor) -> Tensor:
    return x * 0.5 * (1 + n.tanh(n.terms(0.7978845608028654 * (x + 0.044715 * x**3))))


def _erf_gelu(n: Noise, x: Tensor) -> Tensor:
    """``erf`` in fp32, whose error is a part of 1: for negative x it is what is left of ``1 + erf``."""
    return x * 0.5 * (1 + n.terms(torch.erf(n.terms(x * 0.5**0.5))))


PLAIN: dict[str, Formula] = {
    "GELU": _gelu,
    "ErfGELU": _erf_gelu,
    "QGELU": lambda n, x: x * n.sigmoid(n.terms(1.702 * x)),
    "ReLU": lambda n, x: torch.relu(x),
    "SReLU": lambda n, x: torch.relu(x).square(),
    "SiLU": lambda n, x: x * n.sigmoid(x),
}
GATES: dict[str, Formula] = {
    "GLU": lambda n, x: n.sigmoid(x),
    "GeGLU": _gelu,
    "ErfGeGLU": _erf_gelu,
    "QGeGLU": PLAIN["QGELU"],
    "ReGLU": PLAIN["ReLU"],
    "SReGLU": PLAIN["SReLU"],
    "SwiGLU": PLAIN["SiLU"],
}


def halves(x: Tensor, interleave: int | None) -> tuple[Tensor, Tensor]:
    """The gate and the rest: the halves of the columns, or blocks of them in turn."""
    size = x.shape[-1] // 2 if interleave is None else interleave
    if not x.numel():
        return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    blocks = x.reshape(*x.shape[:-1], -1, 2, size)
    return blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)


def gated(n: Noise, x: Tensor, gate: Formula, interleave: int | None = None) -> Tensor:
    a, b = halves(n.terms(x), interleave)
    return n.terms(n.terms(gate(n, a)) * b)


def clamped(n: Noise, x: Tensor, interleave: int | None, limit: float, alpha: float, offset: float) -> Tensor:
    a, b = halves(n.terms(x), interleave)
    a = a.clamp(max=limit)
    return n.terms(n.terms(a * n.sigmoid(n.terms(alpha * a))) * n.terms(b.clamp(-limit, limit) + offset))


def situ(n: Noise, x: Tensor, interleave: int | None, beta1: float, beta2: float) -> Tensor:
    a, b = halves(n.terms(x), interleave)
    return n.terms(n.terms(beta1 * n.tanh(n.terms(a / beta1)) * n.sigmoid(a)) * beta2 * n.tanh(n.terms(b / beta2)))


def tanh_srelu(n: Noise, x: Tensor, s: float) -> Tensor:
    return n.terms((s * n.tanh(n.terms(torch.relu(n.terms(x)) / s))).square())


def scaled(n: Noise, y: Tensor, scales: Tensor) -> Tensor:
    """Each row by its own number."""
    return n.terms(n.terms(y, y.shape[-1]) * scales.reshape(*y.shape[:-1], 1), y.shape[-1])


def layernorm(n: Noise, x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """Over as many of the last dimensions as ``weight`` has."""
    shape, columns = x.shape, weight.numel()
    x = n.terms(x.reshape(-1, columns))
    centered = n.terms(x - n.terms(x.mean(-1, keepdim=True), columns), columns)
    rsigma = n.terms((n.terms(centered.square().mean(-1, keepdim=True), columns) + eps).rsqrt())
    gamma = n.cast(weight.reshape(-1)) + float(zero_centered)
    y = n.terms(_per_column(n, n.terms(centered * rsigma, columns), gamma))
    return shifted(n, y, bias.reshape(-1)).reshape(shape)


def rmsnorm(n: Noise, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    shape, columns = x.shape, weight.numel()
    x = n.terms(x.reshape(-1, columns), columns)
    rsigma = n.terms((n.terms(x.square().mean(-1, keepdim=True), columns) + eps).rsqrt())
    gamma = n.cast(weight.reshape(-1)) + float(zero_centered)
    return n.terms(_per_column(n, n.terms(x * rsigma, columns), gamma)).reshape(shape)


def l2norm(n: Noise, x: Tensor, eps: float) -> Tensor:
    x = n.terms(x, x.shape[-1])
    return n.terms(x * n.terms((x.square().sum(-1, keepdim=True) + eps).rsqrt(), x.shape[-1]), x.shape[-1])


def _per_column(n: Noise, x: Tensor, gamma: Tensor) -> Tensor:
    """``x * gamma``: the gradient of gamma is a sum over all rows."""
    return x * n.terms(gamma.expand_as(x), len(x))


def shifted(n: Noise, x: Tensor, bias: Tensor) -> Tensor:
    """``x + bias``: the gradient of bias is a sum over all rows."""
    return n.terms(x) + n.terms(n.cast(bias).expand_as(x), x.shape[:-1].numel())


def linear(n: Noise, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = n.stored(n.product(x.reshape(-1, x.shape[-1]), weight)).reshape(*x.shape[:-1], len(weight))
    return y if bias is None else shifted(n, y, bias)


def grouped(n: Noise, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], sizes: Sequence[int], scales: Tensor | None) -> Tensor:
    """A linear layer for each group of rows; rows of no group give 0."""
    rows, parts, start = x.reshape(-1, x.shape[-1]), [], 0
    for i, size in enumerate(sizes):
        y = n.stored(n.product(rows[start : start + size], weights[i]))
        if biases:
            bias = n.terms(n.cast(biases[i]).expand_as(y), size)
            y = n.terms(y) + (bias if scales is None else n.terms(bias * n.terms(scales[start : start + size, None]), y.shape[-1]))
        parts.append(y)
        start += size
    parts.append(rows.new_zeros(len(rows) - start, len(weights[0])))
    return torch.cat(parts).reshape(*x.shape[:-1], len(weights[0]))


def mixture(n: Noise, x: Tensor, router: Tensor, up: Tensor, down: Tensor, activation: str, sigmoid: bool = False) -> Tensor:
    """All experts of each row, times the softmax over the router's logits, or their sigmoids over the sum of these. The router's product is in no
    recipe's format; the gradients of its logits and of each expert's rows are written in the activations' dtype."""
    rows = n.leaf(x.reshape(-1, x.shape[-1]), n.dtype)
    logits = n.leaf(n.terms(n.unquantized().product(rows, router), rows.shape[-1]), n.dtype)
    scores, total = n.terms(logits).sigmoid() if sigmoid else n.terms(logits).softmax(-1), rows.new_zeros(len(rows), down.shape[1])
    probs = n.terms(scores / scores.sum(-1, keepdim=True) if sigmoid else scores, len(router))
    for i in range(len(router)):
        h = n.stored(n.product(n.leaf(rows, n.dtype), up[i]))
        h = gated(n, h, GATES["SwiGLU"]) if activation == "swiglu" else n.terms(PLAIN["GELU"](n, n.terms(h)))
        y = n.stored(n.product(n.stored(h), down[i]))
        total = n.terms(total + n.terms(probs[:, i : i + 1] * n.terms(y, y.shape[-1]), y.shape[-1]))
    return total.reshape(*x.shape[:-1], total.shape[-1])


class Rope(NamedTuple):
    """``width`` columns of a head are rotated, pair i by ``base**(-2 i / width) * factors[i]`` a position."""

    base: float
    width: int
    factors: tuple[float, ...]


def _rotated(n: Noise, x: Tensor, lengths: Sequence[int], rope: Rope) -> Tensor:
    x, rest = x.split([rope.width, x.shape[-1] - rope.width], -1)
    width = rope.width
    positions = torch.cat([torch.arange(length) for length in lengths]).double()
    inverse = rope.base ** (-torch.arange(0, width, 2).double() / width) * torch.tensor(rope.factors, dtype=torch.float64)
    angle = n.terms(torch.cat([positions[:, None] * inverse] * 2, -1)[:, None, :])
    half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return torch.cat([n.stored(n.terms(x) * n.terms(angle.cos()) + n.terms(half) * n.terms(angle.sin())), n.terms(rest)], -1)


def attention(
    n: Noise,
    x: Tensor,
    lengths: Sequence[int],
    heads: int,
    groups: int,
    width: int,
    causal: bool,
    rope: Rope | None,
    scale: float,
    soft_cap: float | None = None,
    slopes: Sequence[float] | None = None,
) -> Tensor:
    """Of q, k and v side by side, ``[tokens, *]``; q and k are rotated, and probabilities may be rounded to the dtype of the activations."""
    q, k, v = (part.reshape(len(x), -1, width) for part in x.split([heads * width, groups * width, groups * width], 1))
    if rope is not None:
        q, k = (_rotated(n, part, lengths, rope) for part in (q, k))
    return _attended(n, q, k, v, lengths, causal, scale, soft_cap, slopes)


def _attended(
    n: Noise,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    causal: bool,
    scale: float,
    soft_cap: float | None = None,
    slopes: Sequence[float] | None = None,
) -> Tensor:
    parts = []
    for q_, k_, v_ in zip(*(part.split(list(lengths)) for part in (q, k, v)), strict=True):
        k_, v_ = (n.terms(part.repeat_interleave(q.shape[1] // k.shape[1], 1), 2 * len(q_)) for part in (k_, v_))
        scores = _scores(n, q_, k_, scale, soft_cap)
        if slopes is not None:
            distance = (torch.arange(len(q_))[:, None] - torch.arange(len(q_))).abs()
            scores = n.terms(scores - torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance)
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        parts.append(n.stored(n.attended(scores, v_)))
    return torch.cat(parts).flatten(1)


def latent_attention(
    n: Noise,
    x: Tensor,
    lengths: Sequence[int],
    heads: int,
    groups: int,
    widths: tuple[int, int, int | None],
    causal: bool,
    rope: Rope,
    pairs: bool,
    scale: float,
) -> Tensor:
    """Of q, the rotated key of all heads, and the groups' own keys and values. ``widths``: of keys, of what is rotated, of values."""
    key, turned, value = widths
    q, of_all, kv = x.split([heads * (key + turned), turned, groups * (key + (value or 0))], 1)
    q, kv = q.unflatten(1, (heads, -1)), kv.unflatten(1, (groups, -1))

    def rotated(part: Tensor) -> Tensor:
        ordered = part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if pairs else part
        return _rotated(n, ordered, lengths, rope)

    k = torch.cat([n.terms(kv[..., :key]), rotated(of_all[:, None]).expand(-1, groups, -1)], -1)
    q = torch.cat([n.terms(q[..., :key]), rotated(q[..., key:])], -1)
    return _attended(n, q, k, kv if value is None else kv[..., key:], lengths, causal, scale)


def _scores(n: Noise, q: Tensor, k: Tensor, scale: float, soft_cap: float | None) -> Tensor:
    scores = n.terms(torch.einsum("qhd,khd->hqk", n.terms(q, 2 * q.shape[-1]), k) * scale, q.shape[-1])
    return scores if soft_cap is None else n.terms(soft_cap * torch.tanh(scores / soft_cap))


def cross_attention(n: Noise, x: Tensor, kv: Tensor, heads: int, groups: int, width: int, scale: float, soft_cap: float | None) -> Tensor:
    """Of queries ``[sequences, tokens, *]`` over k and v side by side, ``[sequences, keys, *]``."""
    parts = []
    for q, own in zip(x, kv, strict=True):
        k, v = (n.terms(part.unflatten(-1, (-1, width)).repeat_interleave(heads // groups, 1), 2 * len(q)) for part in own.chunk(2, -1))
        parts.append(n.stored(n.attended(_scores(n, q.unflatten(-1, (heads, width)), k, scale, soft_cap), v)).flatten(1))
    return torch.stack(parts)
