"""A runner that calls tex on lazy tensors: torch tensors go in and come out, and what a call wrote is written into the torch tensors."""

from __future__ import annotations

import inspect
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from tex_backends import Runner

from fusible import tex
from fusible.conformance.recording import RecordingCrossing


class LazyRunner(Runner):
    """Records each call, compiles it with everything it wrote, and runs it."""

    def __call__(self, function: str, **arguments: Any) -> Any:
        if function == "fused_attn_fwd" and arguments["p_dropout"] and arguments["rng_gen"] is None:
            arguments["rng_gen"] = torch.tensor([20240229, 3])
        crossing = RecordingCrossing()
        decision = tex.explain(function, **crossing.enter(arguments))
        if decision.backend != self.backend:
            pytest.skip(f"xla {dict(decision.others)[self.backend]}")
        owner, name = (tex.prim, function.removeprefix("prim_")) if function.startswith("prim_") else (tex, function)
        return crossing.leave(getattr(owner, name)(**crossing.enter(arguments)))


RUNNER = LazyRunner("xla")


def adopted(module: ModuleType) -> dict[str, Any]:
    """The tests of ``module`` that take a runner, without the parametrisation that says which; those whose runner varies with more are left out."""
    tests: dict[str, Any] = {}
    for name, test in vars(module).items():
        if not name.startswith("test_") or test.__module__ != module.__name__ or "runner" not in inspect.signature(test).parameters:
            continue
        marks = getattr(test, "pytestmark", [])
        if any("runner" in mark.args[0] and mark.args[0] != "runner" for mark in marks if mark.name == "parametrize"):
            continue
        twin = FunctionType(test.__code__, test.__globals__, name, test.__defaults__, test.__closure__)
        twin.__dict__.update(test.__dict__)
        twin.__annotations__, twin.__doc__ = test.__annotations__, test.__doc__
        twin.pytestmark = [mark for mark in marks if mark.args[:1] != ("runner",)]  # type: ignore[attr-defined]
        tests[name] = twin
    return tests
