"""Megatron-core with its Transformer Engine layers, as its users launch it: in every recipe, and in two processes by each of its ways to share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from client_runs import TWO_OF_TORCHRUN, apart, check_quantized, printed

ONE = TWO_OF_TORCHRUN.replace("2", "1")
LAYERS = "`GPTModel` with its Transformer Engine layers"
SHOWN = {"delayed": "delayed", "tensorwise": "current", "blockwise": "FP8 in blocks", "mxfp8": "MXFP8"}
RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}
DENSE: dict[str, Any] = {}
EXPERTS: dict[str, Any] = {"experts": 4}
OF_EXPERTS = ("delayed", "mxfp8")
ALONE: dict[str, dict[str, Any]] = {
    "bf16": DENSE,
    **RECIPES,
    "experts bf16": EXPERTS,
    # Megatron's own checkpoints of grouped layers want what delayed scaling alone has.
    **{f"experts {name}": {**EXPERTS, **recipe, "saved": name == "delayed"} for name, recipe in RECIPES.items()},
}
"""By name, the runs of one process."""
SHARED: dict[str, dict[str, Any]] = {
    "data bf16": DENSE,
    "tensor bf16": {"tensor": 2},
    **{f"tensor {name}": {"tensor": 2, **recipe} for name, recipe in RECIPES.items()},
    **{f"context {kind}": {"context": 2, "more": {"cp_comm_type": kind}} for kind in ("p2p", "a2a", "all_gather")},
    "context mxfp8": {"context": 2, "more": {"cp_comm_type": "p2p"}, **RECIPES["mxfp8"]},
    "expert bf16": {**EXPERTS, "expert": 2},
    **{f"expert {name}": {**EXPERTS, "expert": 2, **RECIPES[name], "saved": name == "delayed"} for name in OF_EXPERTS},
}
"""Those of two."""


def trained(command: str, runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = printed(command, "megatron_model.py", json.dumps(list(runs.values())), options=("--capability", "10.0"))
    return dict(zip(runs, found, strict=True))


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return trained(ONE, ALONE)


@pytest.fixture(scope="module")
def shared() -> dict[str, dict[str, Any]]:
    return trained(TWO_OF_TORCHRUN, SHARED)


def megatron(feature: str, recipes: Iterable[str], command: str) -> pytest.MarkDecorator:
    """A row of the page."""
    return pytest.mark.client("megatron-core", feature=f"{LAYERS}: {feature}", recipes=["bf16", *map(SHOWN.__getitem__, recipes)], command=command)


def check(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """Three products a layer and step, all of quantized operands where there is a recipe, and the losses of bf16 to some roundings of 8 bits."""
    assert found["linears"] == plain["linears"]
    check_quantized(found, plain)


@megatron("distributed optimizer and checkpoints", RECIPES, ONE)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_trains_in_8_bits(alone: dict[str, dict[str, Any]], recipe: str) -> None:
    check(alone[recipe], alone["bf16"])


@megatron("mixture of experts: grouped products, fused permutation", RECIPES, ONE)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_mixture_of_experts_trains_in_8_bits(alone: dict[str, dict[str, Any]], recipe: str) -> None:
    check(alone[f"experts {recipe}"], alone["experts bf16"])


@megatron("tensor parallel 2 with sequence parallel", RECIPES, TWO_OF_TORCHRUN)
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_that_share_layers_train_in_8_bits(shared: dict[str, dict[str, Any]], recipe: str) -> None:
    check(shared[f"tensor {recipe}"], shared["tensor bf16"])


@megatron("expert parallel 2", OF_EXPERTS, TWO_OF_TORCHRUN)
@pytest.mark.parametrize("recipe", OF_EXPERTS)
def test_two_processes_that_share_experts_train_in_8_bits(shared: dict[str, dict[str, Any]], recipe: str) -> None:
    check(shared[f"expert {recipe}"], shared["expert bf16"])


@megatron("context parallel 2: `p2p` (MXFP8 too), `a2a`, `all_gather`", ["mxfp8"], TWO_OF_TORCHRUN)
@pytest.mark.parametrize("kind", ["p2p", "a2a", "all_gather"])
def test_two_processes_that_share_sequences_train_as_one(alone: dict[str, dict[str, Any]], shared: dict[str, dict[str, Any]], kind: str) -> None:
    """The model and its data are those of one process: the losses differ by roundings to bf16, at most 2^-8 each."""
    one, two = alone["bf16"]["losses"], shared[f"context {kind}"]["losses"]
    assert apart(two, one) < 2**-8
    check(shared["context mxfp8"], shared["context p2p"])
