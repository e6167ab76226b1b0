"""A GPT written for Tripy: seeded weights, a prompt of growing length through one executable, tokens chosen by torch over DLPack.

It knows nothing of Fusible: ``fusible run --tripy gpt.py OUT`` runs it, and OUT holds the weights, the logits and the tokens.
"""

import math
import sys

import numpy as np
import nvtripy as tp
import torch

CONTEXT, WORDS, LAYERS, HEADS, WIDTH, NEW = 32, 61, 2, 4, 48, 5


class SelfAttention(tp.Module):
    def __init__(self, dtype):
        super().__init__()
        self.c_attn = tp.Linear(WIDTH, 3 * WIDTH, dtype=dtype)
        self.c_proj = tp.Linear(WIDTH, WIDTH, dtype=dtype)
        self.bias = tp.tril(tp.ones((CONTEXT, CONTEXT), dtype=dtype))

    def forward(self, x):
        batch, length = x.shape[0:2]

        def heads(part):
            return tp.transpose(tp.reshape(part, (batch, length, HEADS, WIDTH // HEADS)), 1, 2)

        q, k, v = map(heads, tp.split(self.c_attn(x), 3, dim=2))
        scores = (q @ tp.transpose(k, -2, -1)) * (1.0 / math.sqrt(WIDTH // HEADS))
        mask = self.bias[:length, :length] == tp.zeros((length, length), dtype=self.bias.dtype)
        weights = tp.softmax(tp.masked_fill(scores, mask, float("-inf")), dim=-1)
        return self.c_proj(tp.reshape(tp.transpose(weights @ v, 1, 2), (batch, length, WIDTH)))


class Mlp(tp.Module):
    def __init__(self, dtype):
        super().__init__()
        self.c_fc = tp.Linear(WIDTH, 4 * WIDTH, dtype=dtype)
        self.c_proj = tp.Linear(4 * WIDTH, WIDTH, dtype=dtype)

    def forward(self, x):
        return self.c_proj(tp.gelu(self.c_fc(x)))


class Block(tp.Module):
    def __init__(self, dtype):
        super().__init__()
        self.ln_1 = tp.LayerNorm(WIDTH, dtype=dtype)
        self.attn = SelfAttention(dtype)
        self.ln_2 = tp.LayerNorm(WIDTH, dtype=dtype)
        self.mlp = Mlp(dtype)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Transformer(tp.Module):
    def __init__(self, dtype):
        super().__init__()
        self.wte = tp.Embedding(WORDS, WIDTH, dtype=dtype)
        self.wpe = tp.Embedding(CONTEXT, WIDTH, dtype=dtype)
        self.h = tp.Sequential(*[Block(dtype) for _ in range(LAYERS)])
        self.ln_f = tp.LayerNorm(WIDTH, dtype=dtype)
        self.positions = tp.reshape(tp.arange(CONTEXT, dtype=tp.int32), (1, CONTEXT))

    def forward(self, tokens):
        places = self.wpe(self.positions[:, : tokens.shape[1]])
        return self.ln_f(self.h(self.wte(tokens) + places))


class Gpt(tp.Module):
    def __init__(self, dtype=tp.float32):
        super().__init__()
        self.transformer = Transformer(dtype)
        self.lm_head = tp.Linear(WIDTH, WORDS, bias=False, dtype=dtype)

    def forward(self, tokens):
        return self.lm_head(self.transformer(tokens))


def seeded(model, seed):
    """Numbers for every parameter that has none, and these by name."""
    numbers = np.random.default_rng(seed)
    values = {}
    for name, parameter in model.state_dict().items():
        if name.endswith((".attn.bias", "positions")):
            continue
        values[name] = (numbers.standard_normal(tuple(parameter.shape)) * 0.2 + ("ln_" in name and name.endswith("weight"))).astype(np.float32)
    missing, unexpected = model.load_state_dict({name: tp.Tensor(value) for name, value in values.items()}, strict=False)
    assert not unexpected and all(name.endswith((".attn.bias", "positions")) for name in missing)
    return values


def main():
    model = Gpt()
    weights = seeded(model, 7)
    run = tp.compile(model, args=[tp.InputInfo((1, (1, 8, CONTEXT)), dtype=tp.int32)])
    tokens = torch.tensor([[5, 11, 2, 40, 9]], dtype=torch.int32)
    for _ in range(NEW):
        logits = run(tp.copy(tp.Tensor(tokens), tp.device("gpu")))
        logits.eval()
        run.stream.synchronize()
        chosen = torch.from_dlpack(logits)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, chosen.to(torch.int32)], 1)
    print("tokens:", tokens.tolist())
    print(run)
    np.savez(sys.argv[1], logits=torch.from_dlpack(logits).numpy(), tokens=tokens.numpy(), **weights)


if __name__ == "__main__":
    main()
