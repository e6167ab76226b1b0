"""Where a tensor lies follows from what it is for, never from torch's default device: a call that makes one names its device.

Parameters are made by torch's own initializers, which follow the default device as those of torch's modules do.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fusible

ROOT = Path(fusible.__file__).parent
MAKERS = frozenset(
    "arange as_tensor asarray empty empty_permuted empty_strided eye full linspace logspace ones rand randint randn randperm range scalar_tensor "
    "tensor tril_indices triu_indices zeros".split()
)
"""What ``torch.device(...)`` as a context gives another device."""
ROOMS_OF_SAMPLES = (ROOT / "conformance", ROOT / "cli" / "bench")
"""Which make a user's tensors."""


def unnamed(source: str) -> Iterator[int]:
    """The lines of the calls that say no device."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and any(isinstance(part, ast.Attribute) and is_maker(part) for part in functions(node.func)):
            if not any(keyword.arg in ("device", None) for keyword in node.keywords):
                yield node.lineno


def functions(called: ast.expr) -> list[ast.expr]:
    """What may be called: both sides of a choice."""
    return [*functions(called.body), *functions(called.orelse)] if isinstance(called, ast.IfExp) else [called]


def is_maker(function: ast.Attribute) -> bool:
    return function.attr in MAKERS and isinstance(function.value, ast.Name) and function.value.id == "torch"


def test_every_tensor_that_is_made_has_a_device_named() -> None:
    files = [path for path in ROOT.rglob("*.py") if not any(path.is_relative_to(room) for room in ROOMS_OF_SAMPLES)]
    assert len(files) > 300
    assert [f"{path.relative_to(ROOT)}:{line}" for path in sorted(files) for line in unnamed(path.read_text(encoding="utf-8"))] == []


def test_what_is_found() -> None:
    assert list(
        unnamed("torch.empty(2)\nx.new_empty(2)\ntorch.zeros(2, device=d)\n(torch.ones if x else torch.zeros)(3)\ntorch.empty(2, **how)")
    ) == [1, 4]
