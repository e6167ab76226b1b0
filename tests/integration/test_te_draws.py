"""Modules and operations by NVIDIA's names against NVIDIA's own, with options, recipes and rows of operations that are drawn by seeds."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from te_client import EPSILON, package, recipe_for, relative_error
from te_draws import DRAWS, drawn
from te_op_draws import OPERATIONS, Drawn, drawn_operation, drawn_row, results_of
from te_public import sides
from te_twins import OURS, RECIPES, compare

import fusible

LONG = pytest.mark.slow


@pytest.fixture
def te() -> Iterator[Any]:
    with package() as te, warnings.catch_warnings():
        yield te


def compare_rows(te: Any, row: list[Drawn], seed: str) -> None:
    """Outputs and gradients of a row in NVIDIA's package and in ours. The bound is that of ``te_twins.compare``; without a product it is that of the
    rounding to bf16, for each operation once."""
    rng = random.Random(seed)
    recipe, dtype = rng.choice(RECIPES), rng.choice((torch.bfloat16, torch.float32))
    nvidias = recipe_for(te, recipe)
    own = OURS[recipe]() if nvidias is not None else None
    theirs, ours = sides()
    state: dict[str, Any] = {}
    wanted = dict(results_of(theirs, row, lambda: te.autocast(enabled=nvidias is not None, recipe=nvidias), dtype, state))
    found = dict(results_of(ours, row, lambda: fusible.autocast(enabled=own is not None, recipe=own), dtype, state))
    assert list(found) == list(wanted)
    products = sum(operation.products for operation in row)
    eps = EPSILON[recipe] if products else 2.0**-8
    for name, value in wanted.items():
        if not isinstance(value, torch.Tensor):
            assert found[name] == value, name
            continue
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        bound = eps * math.sqrt((2 if name.startswith("output") else 4) * max(products, len(row)))
        if value.count_nonzero():
            assert relative_error(found[name], value) <= bound, name
        else:
            assert not found[name].count_nonzero(), name


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=LONG) for seed in range(2, 60))])
@pytest.mark.parametrize("kind", DRAWS)
def test_a_drawn_module_computes_what_nvidias_does(te: Any, kind: str, seed: int) -> None:
    compare(te, *drawn(kind, seed))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=LONG) for seed in range(1, 12))])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_drawn_operation_computes_what_nvidias_does(te: Any, alone: None, name: str, seed: int) -> None:
    compare_rows(te, drawn_operation(name, seed), f"{name} {seed}")


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=LONG) for seed in range(8, 100))])
def test_a_drawn_row_of_operations_computes_what_nvidias_does(te: Any, seed: int) -> None:
    compare_rows(te, drawn_row(seed), f"row {seed}")
