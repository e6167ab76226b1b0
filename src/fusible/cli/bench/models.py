"""The models that are trained side by side. A step is forward, backward and optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusible import pytorch as fusible
from fusible.cli.bench.plain import PlainGPT
from fusible.cli.bench.timing import side_by_side
from fusible.cli.training.model import RECIPES_BY_NAME, ByteGPT
from fusible.cli.training.options import TrainOptions

__all__ = ["CONTESTANTS", "MODELS", "Step", "describe_model", "make_step", "plain_dtype", "work_of"]

Step = Callable[[], None]
MODELS = ("mlp", "gpt")
CONTESTANTS = ("torch", "torch compiled", "delayed", "current")
"""Torch in `plain_dtype`, eager and compiled, and Fusible under two recipes."""

_BF16 = torch.bfloat16
_SEVERAL = 4


class _Size(NamedTuple):
    tokens: int
    hidden: int
    inner: int


def _mlp_size(quick: bool) -> _Size:
    return _Size(32, 16, 64) if quick else _Size(2048, 1024, 4096)


def _gpt_options(quick: bool) -> TrainOptions:
    return TrainOptions(layers=1, hidden=16, heads=2, seq_len=16, batch=2) if quick else TrainOptions()


def describe_model(model: str, quick: bool) -> str:
    """What is trained, in a few words."""
    if model == "mlp":
        tokens, hidden, inner = _mlp_size(quick)
        return f"MLP {hidden}/{inner}, {tokens} tokens, SGD"
    o = _gpt_options(quick)
    return f"GPT {o.layers} x {o.hidden}, {o.batch * o.seq_len} tokens, AdamW"


def work_of(model: str, quick: bool) -> float:
    """The operations of the matrix products of a step; backward has two for each of forward's (in attention, five for two)."""
    if model == "mlp":
        tokens, hidden, inner = _mlp_size(quick)
        return 3 * 4.0 * tokens * hidden * inner
    o = _gpt_options(quick)
    tokens = o.batch * o.seq_len
    weights = 12 * o.layers * o.hidden**2 + 256 * o.hidden
    return 3 * 2.0 * tokens * weights + 3.5 * 2.0 * o.layers * tokens * o.seq_len * o.hidden


@cache
def plain_dtype() -> torch.dtype:
    """The dtype in which torch trains here: bf16, or fp32 where that is several times as fast, as on a CPU without instructions for bf16, whose
    products torch makes element by element in some layouts. By a wide margin, so that every process of a run finds the same."""
    x = torch.randn(256, 256)
    halves = x.to(_BF16)
    times = side_by_side({"bf16": lambda: halves @ halves, "fp32": lambda: x @ x}, rounds=5, seconds=0.0)
    return torch.float32 if _SEVERAL * times["fp32"] < times["bf16"] else _BF16


def make_step(model: str, contestant: str, quick: bool, executor: str = "eager") -> Step:
    """A step of ``model``, "mlp" or "gpt", by one of ``CONTESTANTS``, or by Fusible in bf16 ("bf16") or under another recipe ("mxfp8", "block",
    "nvfp4"); Fusible's are run by ``executor``."""
    torch.manual_seed(0)
    if model == "mlp":
        return _mlp(contestant, _mlp_size(quick), executor)
    return _gpt(contestant, replace(_gpt_options(quick), executor=executor))


def _recipe(contestant: str) -> fusible.Recipe | None:
    return None if contestant == "bf16" or contestant not in RECIPES_BY_NAME else RECIPES_BY_NAME[contestant][0]


def _mlp(contestant: str, size: _Size, executor: str) -> Step:
    tokens, hidden, inner = size
    plain = contestant.startswith("torch")
    if plain:
        parts = (nn.LayerNorm(hidden), nn.Linear(hidden, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, hidden))
        model: Any = nn.Sequential(*parts).to(plain_dtype())
    else:
        model = fusible.Sequential(
            fusible.LayerNorm(hidden, param_dtype=_BF16),
            fusible.Linear(hidden, inner, param_dtype=_BF16),
            fusible.GELU(),
            fusible.Linear(inner, hidden, param_dtype=_BF16),
        )
        model.compile(executor)
    call = torch.compile(model) if contestant == "torch compiled" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    dtype = plain_dtype() if plain else _BF16
    x, dy = torch.randn(tokens, hidden).to(dtype).requires_grad_(), torch.randn(tokens, hidden).to(dtype)
    recipe = _recipe(contestant)

    def step() -> None:
        optimizer.zero_grad()
        x.grad = None
        with fusible.autocast(enabled=recipe is not None, recipe=recipe):
            y = call(x)
        y.backward(dy)
        optimizer.step()

    return step


def _gpt(contestant: str, options: TrainOptions) -> Step:
    text, following = torch.randint(0, 256, (2, options.batch, options.seq_len))
    model: nn.Module
    forward: Callable[[Tensor], Tensor]
    if contestant.startswith("torch"):
        model = PlainGPT(options).to(plain_dtype())
        forward = torch.compile(model) if contestant == "torch compiled" else model
    else:
        model = forward = ByteGPT(options, contestant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(forward(text).flatten(0, 1), following.flatten()).backward()
        optimizer.step()

    return step
