"""Layers that two processes share, what each process does with its part, and the same layer whole: for ``test_parallel_linear``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import fusible
from fusible import autocast
from fusible.pytorch import ops as te_ops
from fusible.quantized import DelayedScaling, Float8CurrentScaling, Recipe

SIZE = 2
TOKENS, IN, OUT = 32, 256, 256
"""16 rows to a process: a block of 32 tokens lies in both. Blocks of 32 and of 128 columns lie in one."""
STEPS = 4
"""The third begins with scales that were observed in all processes, and the fourth replays what the third did."""

RECIPES: dict[str, Recipe | None] = {
    "plain": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
    "block": fusible.Float8BlockScaling(),
}
NVFP4 = fusible.NVFP4BlockScaling()
Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """``layer``: "basic" (BasicLinear), "linear" (Linear with its bias) or "mlp" (a norm and two layers, column and row)."""

    layer: str
    mode: str | None
    sequence: bool
    recipe: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return "-".join([self.layer, self.mode or "", "sequence" if self.sequence else "whole", self.recipe, *self.options]).replace("--", "-")


CASES = [
    *(Case(layer, mode, s, r) for layer in ("basic", "linear") for mode in ("column", "row") for s in (False, True) for r in RECIPES),
    *(Case("basic", mode, True, r, {"accumulate_into_main_grad": True}) for mode in ("column", "row") for r in ("plain", "current")),
    *(Case("mlp", None, s, r) for s in (False, True) for r in ("plain", "delayed", "mxfp8")),
]


def whole_tensors() -> Results:
    """The tensors of the whole layer. The largest value of each is in every part by columns, so that parts are scaled like the whole. By rows the
    ranks' ``x`` and ``dy`` differ in size, so that a scale by the own rows alone would be another."""
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(TOKENS, n, generator=generator) for n in (IN, OUT))
    for t in (x, dy):
        t[TOKENS // 2 :] *= 5
        t.clamp_(-9, 9)[-1, :: IN // 4] = 9.0
    weight, weight2 = (torch.randn(OUT, IN, generator=generator) / 16 for _ in range(2))
    for w in (weight, weight2):
        w.clamp_(-0.2, 0.2)[:: OUT // 4, :: IN // 4] = 0.2
    return {"x": x, "dy": dy, "weight": weight, "weight2": weight2, "bias": torch.randn(OUT, generator=generator)}


def columns(t: torch.Tensor, rank: int) -> torch.Tensor:
    return t.chunk(SIZE, dim=-1)[rank]


def rows(t: torch.Tensor, rank: int) -> torch.Tensor:
    return t.chunk(SIZE, dim=0)[rank]


def build(case: Case, tensors: Results, parallel: bool, rank: int = 0) -> te_ops.Sequential:
    """The layer, or this rank's part of it, holding the tensors."""

    def linear(mode: str | None, weight: torch.Tensor) -> Any:
        group = dist.group.WORLD if case.sequence else None  # either way of naming all processes
        shared = {"tensor_parallel_mode": mode, "tensor_parallel_group": group, "sequence_parallel": case.sequence}
        options: dict[str, Any] = shared if parallel else {}
        made = (te_ops.BasicLinear if case.layer == "basic" else te_ops.Linear)(IN, OUT, **options, **case.options)
        part = weight if not parallel else rows(weight, rank) if mode == "column" else columns(weight, rank)
        with torch.no_grad():
            made.weight.copy_(part)
            if case.layer != "basic":
                bias = tensors["bias"]
                made.bias.copy_(bias if not parallel else rows(bias, rank) if mode == "column" else bias * (0.25 + 0.5 * rank))
        if case.options:
            made.weight.main_grad = torch.zeros_like(part)
        return made

    if case.layer == "mlp":
        return te_ops.Sequential(te_ops.RMSNorm(IN), linear("column", tensors["weight"]), te_ops.GELU(), linear("row", tensors["weight2"]))
    return te_ops.Sequential(linear(case.mode, tensors["weight"]))


def inputs(case: Case, tensors: Results, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of ``x`` and of ``dy``."""
    first, last = case.mode or "column", case.mode or "row"
    share: Callable[..., torch.Tensor] = rows if case.sequence else lambda t, rank: t
    x = share(tensors["x"], rank) if first == "column" else columns(tensors["x"], rank)
    dy = share(tensors["dy"], rank) if last == "row" else columns(tensors["dy"], rank)
    return x, dy


def train(model: te_ops.Sequential, case: Case, x: torch.Tensor, dy: torch.Tensor, group: Any = None) -> Results:
    """What ``STEPS`` passes give in the last of them; ``x`` becomes smaller, so that no scale of an earlier pass is too large for it."""
    results: Results = {}
    for step in range(STEPS):
        leaf = (x * (STEPS - step)).requires_grad_()
        model.zero_grad()
        with autocast(enabled=RECIPES[case.recipe] is not None, recipe=RECIPES[case.recipe], amax_reduction_group=group):
            y = model(leaf)
        y.backward(dy)
        results = {"y": y.detach(), "dx": leaf.grad}  # type: ignore[dict-item]
    fusible.pytorch.reduce_sequence_parallel_gradients(model)
    for name, parameter in model.named_parameters():
        if getattr(parameter, "main_grad", None) is not None:
            assert parameter.grad is None
            results[f"{name} main_grad"] = parameter.main_grad  # pyright: ignore[reportAttributeAccessIssue]
        else:
            results[name] = parameter.grad  # type: ignore[assignment]
    with torch.no_grad(), autocast(enabled=RECIPES[case.recipe] is not None, recipe=RECIPES[case.recipe], amax_reduction_group=group):
        results["inference"] = model(x)
    return results


def run_part(case: Case, rank: int) -> Results:
    tensors = whole_tensors()
    model = build(case, tensors, True, rank)
    results = train(model, case, *inputs(case, tensors, rank), dist.group.WORLD if case.layer == "mlp" else None)
    executor: Any = model.pipeline(0).executor
    results["replayed"] = torch.tensor(not executor._unlistable and any(replay is not None for replay in executor._replays.values()))
    return results


def run_whole(case: Case) -> Results:
    tensors = whole_tensors()
    return train(build(case, tensors, False), case, tensors["x"], tensors["dy"])
