"""NVIDIA's modules within torch's data parallelism, in two processes and every recipe."""

from __future__ import annotations

import json
from typing import Any

import pytest
from client_runs import RECIPES, TWO_OF_TORCHRUN, apart, check_quantized, printed


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, dict[str, Any]]]:
    """By mode and way, what comes of it: made once."""
    modes = ["bf16", *RECIPES]
    return dict(zip(modes, printed(TWO_OF_TORCHRUN, "parallel_modules.py", json.dumps(modes)), strict=True))


Runs = dict[str, dict[str, dict[str, Any]]]


def check(runs: Runs, recipe: str, way: str) -> None:
    """Beside one process that has all data: in bf16 the same but for roundings, of which each is 2^-8 of a number and the loss's are summed over 128
    tokens in fp32; in 8 bits as bf16."""
    check_quantized(runs[recipe][way], runs["bf16"][way])
    assert apart(runs["bf16"][way]["losses"], runs["bf16"]["alone"]["losses"]) < 2**-8 / 128**0.5


@pytest.mark.client(
    "torch", "transformer_engine", feature="`DistributedDataParallel` of NVIDIA's modules", recipes=RECIPES.values(), command=TWO_OF_TORCHRUN
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_data_parallel_modules_train(runs: Runs, recipe: str) -> None:
    check(runs, recipe, "ddp")
    assert runs[recipe]["ddp"]["same"], "the processes' parameters"


@pytest.mark.client(
    "torch", "transformer_engine", feature="`fully_shard` (FSDP2) of NVIDIA's modules", recipes=RECIPES.values(), command=TWO_OF_TORCHRUN
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_sharded_modules_train(runs: Runs, recipe: str) -> None:
    check(runs, recipe, "fsdp2")
