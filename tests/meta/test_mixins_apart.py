"""A backend is made of mixins, each with steps of its own: no two of them call one by the same name, or the first would serve both."""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict

import pytest

from fusible.tex.selection.registry import registry


@pytest.mark.parametrize("name", ["torch", "cpu", "xla"])
def test_no_two_mixins_of_a_backend_have_a_step_of_one_name(name: str) -> None:
    if name == "xla":
        pytest.importorskip("jaxlib")
    steps: dict[str, list[type]] = defaultdict(list)
    for cls in type(registry.find(name)).__mro__[:-1]:
        for step, value in vars(cls).items():
            if step.startswith("_") and not step.startswith("__") and (inspect.isfunction(value) or isinstance(value, staticmethod)):
                steps[step].append(cls)
    unrelated = {
        step: [(a.__qualname__, b.__qualname__) for a, b in itertools.combinations(owners, 2) if not issubclass(a, b) and not issubclass(b, a)]
        for step, owners in steps.items()
    }
    assert {step: pairs for step, pairs in unrelated.items() if pairs} == {}
