"""GPT-2's architecture with seeded weights, and generation by one compiled forward pass.

* ``python examples/lazy/nanogpt.py --prompt "To be" --tokens 20``
* ``python examples/lazy/nanogpt.py --check`` beside the same model in torch
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from seeded_weights import seeded_weights

import fusible.lazy as tp


@dataclass(frozen=True)
class Config:
    """Sizes; GPT-2 small is ``Config(12, 12, 768, 50257, 1024)``. Tokens are the bytes of a text here."""

    layers: int = 2
    heads: int = 4
    hidden: int = 64
    vocabulary: int = 256
    context: int = 64


class Attention(tp.Module):
    """Causal self-attention; queries, keys and values come from one projection."""

    def __init__(self, config: Config) -> None:
        self.heads = config.heads
        self.c_attn = tp.Linear(config.hidden, 3 * config.hidden)
        self.c_proj = tp.Linear(config.hidden, config.hidden)

    def forward(self, x: tp.Tensor) -> tp.Tensor:
        batch, tokens, hidden = x.shape
        split = (batch, tokens, self.heads, hidden // self.heads)
        q, k, v = (part.reshape(split).transpose(1, 2) for part in self.c_attn(x).split(3, dim=2))
        scores = q @ k.transpose(2, 3) / math.sqrt(hidden // self.heads)
        row, column = (tp.iota((tokens, tokens), dim, tp.int32) for dim in (0, 1))
        scores = tp.where(column <= row, scores, -math.inf)
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


class MLP(tp.Module):
    def __init__(self, config: Config) -> None:
        self.c_fc = tp.Linear(config.hidden, 4 * config.hidden)
        self.c_proj = tp.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: tp.Tensor) -> tp.Tensor:
        return self.c_proj(tp.gelu(self.c_fc(x)))


class Block(tp.Module):
    def __init__(self, config: Config) -> None:
        self.ln_1 = tp.LayerNorm(config.hidden)
        self.attn = Attention(config)
        self.ln_2 = tp.LayerNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x: tp.Tensor) -> tp.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(tp.Module):
    """``[batch, tokens]`` int32 to logits ``[batch, tokens, vocabulary]``; the output projection is the token embedding, transposed."""

    def __init__(self, config: Config) -> None:
        self.wte = tp.Embedding(config.vocabulary, config.hidden)
        self.wpe = tp.Embedding(config.context, config.hidden)
        self.h = [Block(config) for _ in range(config.layers)]
        self.ln_f = tp.LayerNorm(config.hidden)

    def forward(self, tokens: tp.Tensor) -> tp.Tensor:
        x = self.wte(tokens) + self.wpe(tp.arange(tokens.shape[1], dtype=tp.int32))
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.transpose(0, 1)


def make_model(config: Config, seed: int = 0) -> GPT:
    model = GPT(config)
    model.load_state_dict(seeded_weights(model, seed))
    return model


def compile_forward(model: GPT, config: Config) -> tp.Executable:
    """One program for every number of tokens up to the context."""
    lengths = (1, config.context // 4, config.context)
    return tp.compile(model, args=[tp.InputInfo((1, lengths), tp.int32)])


def generate(forward: Callable[[tp.Tensor], Any], config: Config, prompt: list[int], count: int, seed: int = 0) -> list[int]:
    """``prompt`` continued by ``count`` tokens, each drawn by the probabilities that ``forward`` gives it after the last ``context`` tokens."""
    rng = np.random.default_rng(seed)
    tokens = list(prompt)
    for _ in range(count):
        logits = forward(tp.Tensor([tokens[-config.context :]])).numpy()[0, -1].astype(np.float64)
        probabilities = np.exp(logits - logits.max())
        tokens.append(int(rng.choice(config.vocabulary, p=probabilities / probabilities.sum())))
    return tokens


def check(model: GPT, config: Config) -> float:
    """The largest deviation of the logits from those of the same model in torch, relative to the largest logit."""
    from nanogpt_torch import torch_logits  # here, so that the example itself needs no torch

    tokens = np.random.default_rng(2).integers(0, config.vocabulary, (1, config.context), np.int32)
    theirs = torch_logits(model, config, tokens)
    return float(np.abs(compile_forward(model, config)(tokens).numpy() - theirs).max() / np.abs(theirs).max())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt", default="To be, or not to be")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--check", action="store_true", help="compare with the same model in torch")
    options = parser.parse_args(arguments)

    config = Config()
    model = make_model(config)
    count = sum(math.prod(t.shape) for t in model.state_dict().values())
    print(f"{config}: {count:,} parameters")
    if options.check:
        print(f"largest deviation of the logits from torch's: {check(model, config):.1e} of the largest")
        return
    forward = compile_forward(model, config)
    (_, least), _, (_, most) = forward.input_infos["tokens"].shape_bounds
    print(f"recorded once; a program is compiled for each length from {least} to {most} that it meets")
    text = bytes(generate(forward, config, list(options.prompt.encode()), options.tokens))
    print(f"the weights are random, and so is what follows the prompt: {text!r}")


if __name__ == "__main__":
    main()
