"""What Fusible adds to the kernels: a tex call over the chosen method, and a ``Sequential`` of small ops over ``nn.Sequential``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fusible
from fusible import tex
from fusible.cli.bench.generation import Decoder, FusibleDecoder
from fusible.cli.bench.plain import DecoderShape, PlainDecoder
from fusible.cli.bench.timing import side_by_side, using_threads
from fusible.pytorch import ops as operations
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.selection.registry import registry

__all__ = ["dispatch", "small_decoder", "small_sequential"]


_ONE_THREAD = using_threads(1)
"""Python's cost is what is measured here: kernels this small run on one thread."""


@_ONE_THREAD
def dispatch() -> list[dict[str, Any]]:
    """Microseconds of a tex call, of calling the chosen method directly, and their difference. Target: at most 1 us."""
    x, weight, gamma = torch.randn(16, 64), torch.randn(64, 64), torch.randn(64)
    calls: dict[str, tuple[Any, ...]] = {
        "relu": (x, None),
        "dgelu": (x, x, None),
        "rmsnorm_fwd": (x, gamma, 1e-5, None, None, torch.float32, 0, False),
        "generic_gemm": (weight, True, x, False, None, None, torch.float32, None, torch.float32, False, None, False, None, 0, False, True),
    }
    rows = []
    with torch.no_grad():
        for name, args in calls.items():
            method = getattr(registry.find(tex.explain(name, *args).backend or ""), name)
            public = getattr(tex, name)
            times = side_by_side({"direct": lambda m=method, a=args: m(*a), "tex": lambda f=public, a=args: f(*a)}, rounds=60)
            direct, dispatched = times["direct"] * 1e6, times["tex"] * 1e6
            rows.append({"call": name, "direct_us": direct, "tex_us": dispatched, "overhead_us": dispatched - direct})
    assert set(calls) <= set(DECLARATIONS)
    return rows


def _eight(library: Any, width: int) -> list[nn.Module]:
    torch.manual_seed(0)
    linear = [library.Linear(width, width) for _ in range(3)]
    return [library.LayerNorm(width), linear[0], library.GELU(), linear[1], library.ReLU(), linear[2], library.SiLU(), library.LayerNorm(width)]


def _step(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    def step() -> None:
        model(x).sum().backward()

    return step


def _forward(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    def forward() -> None:
        with torch.no_grad():
            model(x)

    return forward


@_ONE_THREAD
def small_sequential() -> list[dict[str, Any]]:
    """Microseconds of eight small modules, and operations, on [16, 64] fp32. Target: at most ``nn.Sequential``'s."""
    width = 64
    models = {
        "nn": nn.Sequential(*_eight(nn, width)),
        "modules": fusible.Sequential(*_eight(fusible, width)),
        "operations": operations.Sequential(*_eight(operations, width)),
    }
    x = torch.randn(16, width, requires_grad=True)
    rows = []
    for name, make in (("forward and backward", _step), ("inference", _forward)):
        times = side_by_side({which: make(model, x) for which, model in models.items()}, rounds=60)
        ratios = {f"{which}_ratio": times[which] / times["nn"] for which in ("modules", "operations")}
        rows.append({"pass": name, **{f"{which}_us": time * 1e6 for which, time in times.items()}, **ratios})
    return rows


_HELD: dict[str, fusible.Recipe | None] = {
    "bf16": None,
    "FP8": fusible.Float8CurrentScaling(),
    "MXFP8": fusible.MXFP8BlockScaling(),
    "FP8 in squares": fusible.Float8BlockScaling(),
    "NVFP4": fusible.NVFP4BlockScaling(),
}
_NARROW = DecoderShape(layers=16, hidden=64, heads=4, groups=2, inner=64, vocabulary=64)
_CACHED = 128


def _holding(recipe: fusible.Recipe | None) -> FusibleDecoder:
    return FusibleDecoder(_NARROW, quantized=recipe is not None, recipe=recipe)


def _token(decoder: Decoder) -> Callable[[], object]:
    """A token after others of one sequence, which begins anew where its cache is full."""
    token, tokens = torch.zeros(1, 1, dtype=torch.int64), itertools.count()

    def step() -> None:
        if next(tokens) % _CACHED == 0:
            decoder.start(1, _CACHED)
        with torch.no_grad():
            decoder.step(token)

    return step


@_ONE_THREAD
def small_decoder() -> list[dict[str, Any]]:
    """Microseconds of a token of 16 layers of width 64, by how weights are held; torch's are in bf16. Target: at most torch's."""
    decoders: dict[str, Decoder] = {"torch": PlainDecoder(_NARROW), **{held: _holding(recipe) for held, recipe in _HELD.items()}}
    times = side_by_side({held: _token(decoder) for held, decoder in decoders.items()}, rounds=60)
    theirs = times["torch"]
    return [{"weights": held, "torch_us": theirs * 1e6, "fusible_us": times[held] * 1e6, "ratio": times[held] / theirs} for held in _HELD]
