"""The backends that the table runs on, and how tensors get into one and out again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from fusible import tex
from fusible.tex import TEXBackendBase
from fusible.tex.selection.registry import registry


def unchanged(tree: Any) -> Any:
    return tree


@dataclass(frozen=True)
class Runner:
    """Calls tex functions on one backend; ``enter`` converts the arguments, ``leave`` the results (nested lists and dicts of tensors)."""

    backend: str
    enter: Callable[[Any], Any] = unchanged
    leave: Callable[[Any], Any] = unchanged

    def __call__(self, function: str, **arguments: Any) -> Any:
        """The result of ``tex.<function>``; skips the test where this backend does not serve the call, and says why."""
        entered = self.enter(arguments)
        with tex.set_backend(self.backend, strict=True):
            decision = tex.explain(function, **entered)
            if decision.backend is None:
                pytest.skip(dict(decision.others).get(self.backend, "not served"))
            owner, name = (tex.prim, function.removeprefix("prim_")) if function.startswith("prim_") else (tex, function)
            return self.leave(getattr(owner, name)(**entered))


RUNNERS: dict[str, Runner] = {}
"""Runners of backends whose tensors are not torch's own; any other backend takes them as they are."""


REFERENCE = Runner("torch")
"""For what a test needs beside the function that it tests."""


def runners(*functions: str) -> list[Runner]:
    """A runner for every backend that is here, implements all ``functions``, and serves torch tensors or is named in ``RUNNERS``."""
    found = []
    for backend in registry.ordered():
        implements = all(getattr(type(backend), name) is not getattr(TEXBackendBase, name) for name in functions)
        takes_torch = backend.DEVICES is None or "cpu" in backend.DEVICES
        if implements and registry.reason_unavailable(backend) is None and (takes_torch or backend.NAME in RUNNERS):
            found.append(RUNNERS.get(backend.NAME, Runner(backend.NAME)))
    return found


def on_backends(*functions: str) -> pytest.MarkDecorator:
    """Parametrise a test by the backends that implement ``functions``."""
    return pytest.mark.parametrize("runner", [pytest.param(runner, id=runner.backend) for runner in runners(*functions)])
