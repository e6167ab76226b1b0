"""What Fusible adds to the kernels: a tex call over the chosen method, and a ``Sequential`` of small ops over ``nn.Sequential``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fusible
from fusible import tex
from fusible.cli.bench.timing import side_by_side, using_threads
from fusible.pytorch import ops as operations
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.selection.registry import registry

__all__ = ["dispatch", "small_sequential"]


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
    """Microseconds of eight small modules, and operations, on [16, 64] fp32. Target, forward and backward: at most 1.4 times ``nn.Sequential``'s."""
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
