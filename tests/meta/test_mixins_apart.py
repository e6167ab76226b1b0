"""A backend is made of mixins, each with steps of its own: no two of them call one by the same name, or the first would serve both."""

from __future__ import annotations

import inspect
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
    apart = {
        step: [a.__qualname__ for a in of if not any(issubclass(a, b) or issubclass(b, a) for b in of if a is not b)] for step, of in steps.items()
    }
    assert {step: owners for step, owners in apart.items() if len(owners) > 1} == {}
