"""A GPT-2-small-sized forward pass (12 layers, width 768, 12 heads), written once over what tp, jax.numpy and torch have in common."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

__all__ = ["HEADS", "LENGTH", "VOCABULARY", "forward", "over_jax", "over_lazy", "over_torch", "parameters"]

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 12, 768, 12, 50257, 128
Weights = dict[str, Any]


def parameters(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Seeded weights, float32, in the proportions of GPT-2's own initialisation."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 0.02) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape, np.float32) * np.float32(scale)

    weights = {"wte": normal(VOCABULARY, WIDTH), "wpe": normal(1024, WIDTH, scale=0.01)}
    for i in range(LAYERS):
        for name in ("ln_1", "ln_2"):
            weights[f"{i}.{name}.weight"], weights[f"{i}.{name}.bias"] = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
        for name, rows, columns in (("attn", WIDTH, 3 * WIDTH), ("proj", WIDTH, WIDTH), ("fc", WIDTH, 4 * WIDTH), ("out", 4 * WIDTH, WIDTH)):
            scale = 0.02 / math.sqrt(2 * LAYERS) if name in ("proj", "out") else 0.02
            weights[f"{i}.{name}.weight"], weights[f"{i}.{name}.bias"] = normal(rows, columns, scale=scale), np.zeros(columns, np.float32)
    weights["ln_f.weight"], weights["ln_f.bias"] = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
    return weights


def forward(ns: Any, p: Weights, ids: Any) -> Any:
    """Logits ``[T, vocabulary]`` of token ids ``[T]``. ``ns`` has take, softmax, where, tanh, mean, rsqrt, permute, reshape, split, causal."""
    length = ids.shape[0]
    x = ns.take(p["wte"], ids) + p["wpe"][:length]
    mask = ns.causal(length)
    for i in range(LAYERS):
        x = x + _attention(ns, p, f"{i}.", _norm(ns, p, f"{i}.ln_1", x), mask, length)
        h = _norm(ns, p, f"{i}.ln_2", x) @ p[f"{i}.fc.weight"] + p[f"{i}.fc.bias"]
        h = 0.5 * h * (1.0 + ns.tanh(0.7978845608028654 * (h + 0.044715 * h * h * h)))
        x = x + (h @ p[f"{i}.out.weight"] + p[f"{i}.out.bias"])
    return _norm(ns, p, "ln_f", x) @ ns.permute(p["wte"], (1, 0))


def _norm(ns: Any, p: Weights, name: str, x: Any) -> Any:
    centred = x - ns.mean(x)
    return centred * ns.rsqrt(ns.mean(centred * centred) + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]


def _attention(ns: Any, p: Weights, at: str, x: Any, mask: Any, length: int) -> Any:
    parts = ns.split(x @ p[f"{at}attn.weight"] + p[f"{at}attn.bias"])
    q, k, v = (ns.permute(ns.reshape(t, (length, HEADS, WIDTH // HEADS)), (1, 0, 2)) for t in parts)
    scores = q @ ns.permute(k, (0, 2, 1)) * (1 / math.sqrt(WIDTH // HEADS))
    out = ns.softmax(ns.where(mask, scores, -1e10)) @ v
    return ns.reshape(ns.permute(out, (1, 0, 2)), (length, WIDTH)) @ p[f"{at}proj.weight"] + p[f"{at}proj.bias"]


def over_lazy() -> Any:
    """The names that ``forward`` needs, by ``fusible.lazy``."""
    import fusible.lazy as tp

    def causal(length: int) -> Any:
        return tp.iota((length, length), 1, tp.int32) <= tp.iota((length, length), 0, tp.int32)

    return SimpleNamespace(
        take=lambda table, ids: tp.gather(table, 0, ids), softmax=lambda x: tp.softmax(x, -1), where=tp.where, tanh=tp.tanh, permute=tp.permute,
        mean=lambda x: tp.mean(x, -1, keepdim=True), rsqrt=tp.rsqrt, reshape=tp.reshape, split=lambda x: tp.split(x, 3, -1), causal=causal,
    )  # fmt: skip


def over_jax() -> Any:
    """The same by ``jax.numpy``."""
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    return SimpleNamespace(
        take=lambda table, ids: table[ids], softmax=lambda x: jax.nn.softmax(x, -1), where=jnp.where, tanh=jnp.tanh, permute=jnp.transpose,
        mean=lambda x: jnp.mean(x, -1, keepdims=True), rsqrt=jax.lax.rsqrt, reshape=jnp.reshape, split=lambda x: jnp.split(x, 3, -1),
        causal=lambda length: jnp.tril(jnp.ones((length, length), bool)),
    )  # fmt: skip


def over_torch() -> Any:
    """The same by torch."""
    import torch

    return SimpleNamespace(
        take=lambda table, ids: table[ids], softmax=lambda x: torch.softmax(x, -1), where=torch.where, tanh=torch.tanh, permute=torch.permute,
        mean=lambda x: x.mean(-1, keepdim=True), rsqrt=torch.rsqrt, reshape=torch.reshape, split=lambda x: x.chunk(3, -1),
        causal=lambda length: torch.ones(length, length, dtype=torch.bool).tril(),
    )  # fmt: skip
