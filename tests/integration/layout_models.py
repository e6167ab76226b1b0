"""Models that several processes share, how they are trained, and what a process can say of them whole: for ``test_layouts``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fusible
from fusible import (
    GELU,
    GroupedQuerySelfAttention,
    LayerNorm,
    Linear,
    MixtureOfExperts,
    MultiHeadedSelfAttention,
    QKNorm,
    Residual,
    RMSNorm,
    Sequential,
    SwiGLU,
)
from fusible.distributed import local_batch
from fusible.quantized import Recipe

HIDDEN, HEADS, VOCABULARY, BATCH, TOKENS, LAYERS = 64, 4, 96, 4, 32, 2
EXPERTS, TOP_K = 8, 2

RECIPES: dict[str, Recipe | None] = {
    "fp32": None,
    "delayed": fusible.DelayedScaling(),
    "current": fusible.Float8CurrentScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
}
Tensors = dict[str, torch.Tensor]
Dimensions = tuple[tuple[str, int], ...]


@cache
def mesh_of(*dimensions: tuple[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(size for _, size in dimensions), mesh_dim_names=tuple(name for name, _ in dimensions))


def along_tp() -> DeviceMesh:
    return mesh_of(("tp", dist.get_world_size()))


class GPT(nn.Module):
    """``kind``: "mha" (as the demo's model), or with RMS norms, grouped keys of normed heads and gates: "gqa" of 2 groups, "mqa" of 1; "moe": with a
    mixture of experts in each block."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        block = {"mha": _block, "moe": _block_of_experts}.get(kind, _gated_block)
        blocks = [part for _ in range(LAYERS) for part in block({"gqa": 2, "mqa": 1}.get(kind, HEADS))]
        self.body = Sequential(*blocks, LayerNorm(HIDDEN), Linear(HIDDEN, VOCABULARY))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.body(self.embedding(text))  # type: ignore[no-any-return]


def _block(groups: int) -> list[Residual]:
    h = HIDDEN
    attention = MultiHeadedSelfAttention(h, groups, rope_base=10000.0)
    return [
        Residual(LayerNorm(h), Linear(h, 3 * h), attention, Linear(h, h)),
        Residual(LayerNorm(h), Linear(h, 4 * h), GELU(), Linear(4 * h, h)),
    ]


def _gated_block(groups: int) -> list[Residual]:
    h, width = HIDDEN, HIDDEN // HEADS
    attention = GroupedQuerySelfAttention(h, HEADS, groups, rope_base=10000.0)
    qkv = Linear(h, h + 2 * groups * width, bias=False)
    return [
        Residual(RMSNorm(h), qkv, QKNorm(HEADS, width, groups=groups), attention, Linear(h, h, bias=False)),
        Residual(RMSNorm(h), Linear(h, 8 * h), SwiGLU(), Linear(4 * h, h, bias=False)),
    ]


def _block_of_experts(groups: int) -> list[Residual]:
    attention, _ = _block(groups)
    return [attention, Residual(RMSNorm(HIDDEN), MixtureOfExperts(HIDDEN, 2 * HIDDEN, EXPERTS, TOP_K))]


def model(kind: str) -> GPT:
    """The same in every process."""
    torch.manual_seed(0)
    return GPT(kind)


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        text = torch.randint(0, VOCABULARY, (BATCH, TOKENS + 1), generator=generator)
        yield text[:, :-1], text[:, 1:]


@dataclass
class Trained:
    """``losses`` of the steps, the ``gradients`` of the last one before they are clipped, and the ``parameters`` after it."""

    losses: list[float]
    gradients: Tensors
    parameters: Tensors


def train(gpt: GPT, recipe: Recipe | None, steps: int, loss: Any = None, mesh: DeviceMesh | None = None, order: int = 1) -> Trained:
    """``loss(logits, following)``: torch's mean cross entropy by default. ``mesh``: of processes that share out each batch. ``order``: -1 for the
    sequences of a batch in reverse, which changes the order of sums alone."""
    loss = loss or (lambda logits, following: nn.functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten()))
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    losses: list[float] = []
    gradients: Tensors = {}
    for text, following in batches(steps):
        text, following = (t.flip(0) if order < 0 else t for t in (text, following))
        text, following = (text, following) if mesh is None else local_batch(mesh, text, following)
        optimizer.zero_grad()
        with fusible.autocast(enabled=recipe is not None, recipe=recipe):
            value = loss(gpt(text), following)
        value.backward()
        gradients = {name: whole(p.grad).clone() for name, p in gpt.named_parameters()}
        nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        losses.append(value.item())
    return Trained(losses, joined(gradients), joined({name: whole(p.detach()).clone() for name, p in gpt.named_parameters()}))


def whole(tensor: Any) -> torch.Tensor:
    """All of what processes share out."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def joined(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """By the names of the whole model: parameters that were divided, q from k and v, or a gate from what it multiplies, are one again."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        part, _, rest = last.partition("_")
        divided = part in ("query", "key", "value", "gate") or (part == "up" and f"{module}.gate_{rest}" in tensors)
        found.setdefault(f"{module}.{rest}" if divided else name, []).append(tensor)
    return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}
