"""The model of ``nanogpt.py`` in torch, with the same names, for ``nanogpt.py --check``."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class TorchBlock(nn.Module):
    def __init__(self, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(hidden, 3 * hidden), "c_proj": nn.Linear(hidden, hidden)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(hidden, 4 * hidden), "c_proj": nn.Linear(4 * hidden, hidden)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.attn["c_attn"](self.ln_1(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](mixed.transpose(1, 2).flatten(2))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class TorchGPT(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocabulary, config.hidden)
        self.wpe = nn.Embedding(config.context, config.hidden)
        self.h = nn.ModuleList(TorchBlock(config.heads, config.hidden) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.hidden)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T


def torch_logits(model, config, tokens: np.ndarray, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """The logits that the weights of ``model`` give for ``tokens`` in torch, computed in ``dtype``."""
    twin = TorchGPT(config)
    twin.load_state_dict({name: torch.from_dlpack(t) for name, t in model.state_dict().items()})
    with torch.no_grad():
        return twin.to(dtype)(torch.from_numpy(tokens)).numpy()
