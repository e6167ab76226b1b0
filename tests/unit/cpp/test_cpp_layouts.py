"""``layouts``: equal for tensors that lie alike, different for any that do not, None of what is no tensor of torch's own on a CPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fusible import cpp_extensions
from fusible.tex.backends.cpu import layouts

BASE = torch.zeros(4, 6)
APART = [
    [],
    [BASE],
    [BASE, BASE],
    [BASE.half()],
    [BASE.to(torch.bfloat16)],
    [BASE.int()],
    [BASE.to(torch.float8_e4m3fn)],
    [BASE.to(torch.float8_e5m2)],
    [BASE.bool()],
    [BASE.to(torch.uint8)],
    [BASE.to(torch.complex64)],
    [BASE.t()],
    [BASE.view(6, 4)],
    [BASE.view(24)],
    [BASE.view(1, 4, 6)],
    [BASE[:2]],
    [BASE[::2]],
    [BASE[:, ::2]],
    [BASE[:0]],
    [BASE[0, 0]],
    [BASE[0]],
    [BASE, BASE.t()],
    [BASE.t(), BASE],
    [BASE[:1].expand(4, 6)],
]


def test_all_that_lie_otherwise_are_told_apart() -> None:
    found = [layouts(list(tensors)) for tensors in APART]
    assert None not in found
    for (i, one), (j, other) in itertools.combinations(enumerate(found), 2):
        assert one != other, (APART[i], APART[j])


@pytest.mark.parametrize(
    "alike",
    [
        BASE + 1,
        torch.nn.Parameter(BASE),
        BASE.clone().requires_grad_(),
        torch.zeros(48)[24:].view(4, 6),
        torch.zeros(9, 6)[3:7],
        torch._neg_view(BASE),
    ],
    ids=["values", "parameter", "gradient", "offset", "rows", "negated"],
)
def test_values_and_places_do_not_count(alike: torch.Tensor) -> None:
    assert layouts([alike, BASE]) == layouts([BASE, alike]) == layouts([BASE, BASE])


class Other(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "other",
    [None, 3, "x", [BASE], BASE.to("meta"), BASE.to_sparse(), BASE.as_subclass(Other), torch.nn.Module()],
    ids=["none", "number", "text", "list", "meta", "sparse", "subclass", "module"],
)
def test_of_anything_else_there_is_none(other: Any) -> None:
    assert layouts([BASE, other]) is None and layouts([other, BASE]) is None


def test_without_kernels_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_extensions, "available", False)
    assert layouts([BASE]) is None
