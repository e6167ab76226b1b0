"""The memory that training takes in each of one, two and four processes, measured and derived: parameters, gradients, moments, what is kept for
backward, and the peak. And the bytes that go from process to process for parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import memory_jobs as jobs
import pytest
from layout_models import Dimensions
from process_group import Job, check, run_jobs_once

from fusible.distributed.cost import Layout, Memory, memory, traffic
from fusible.distributed.cost.gathered import gathered
from fusible.distributed.cost.traffic import exchanged_with_experts

Case = tuple[Dimensions, bool, str, bool, str]
"""The mesh, whether rows are shared out along ``tp``, the recipe, whether weights are gathered as it quantizes them, and which model."""

MODELS = {"dense": jobs.ARCHITECTURE, "mixture": jobs.MIXTURE}

TP, SHARDS, TOKENS = (("tp", 2),), (("dp_shard", 2),), (("cp", 2),)
EXPERTS = (("ep", 2),)
BOTH = SHARDS[0], TP[0]
CASES: dict[int, list[Case]] = {
    1: [
        *(((), False, recipe, False, "dense") for recipe in ("fp32", "bf16", "delayed", "mxfp8")),
        *(((), False, recipe, False, "mixture") for recipe in ("bf16", "current")),
    ],
    2: [
        *(
            (dimensions, sequence, recipe, False, "dense")
            for dimensions, sequence in ((TP, False), (TP, True), (SHARDS, False), (TOKENS, False))
            for recipe in ("bf16", "delayed")
        ),
        (TP, True, "mxfp8", False, "dense"),
        *((SHARDS, False, recipe, low, "mixture") for recipe, low in (("bf16", False), ("current", True), ("mxfp8", True))),
        (SHARDS, False, "current", True, "dense"),
        *((dimensions, rows, "bf16", False, "mixture") for dimensions, rows in ((TP, False), (TP, True), (EXPERTS, False))),
    ],
    4: [
        *((BOTH, True, recipe, False, "dense") for recipe in ("fp32", "delayed")),
        (BOTH, False, "current", True, "dense"),
        ((("dp_shard", 2), ("cp", 2)), False, "bf16", False, "dense"),
        (BOTH, True, "bf16", False, "mixture"),
        ((*SHARDS, *EXPERTS), False, "bf16", False, "mixture"),
        ((*EXPERTS, *TP), True, "bf16", False, "mixture"),
        ((("dp_shard", 2), ("cp", 2)), False, "bf16", False, "mixture"),
    ],
}
IN_STAGES = ("fp32", "bf16", "delayed")
ALL = [(size, case) for size, cases in CASES.items() for case in cases]


GATHERED: dict[int, list[Dimensions]] = {2: [SHARDS], 4: [(("dp_shard", 4),), (("dp_replicate", 2), ("dp_shard", 2)), BOTH]}
RECIPES = [*((recipe, False) for recipe in ("fp32", "bf16", "delayed")), *((recipe, True) for recipe in ("current", "block", "mxfp8", "nvfp4"))]
FOR_PARAMETERS = [(size, dimensions, *recipe, "dense") for size, each in GATHERED.items() for dimensions in each for recipe in RECIPES]
FOR_PARAMETERS += [(size, (("dp_shard", size),), *recipe, "mixture") for size in (2, 4) for recipe in RECIPES]
FOR_PARAMETERS += [(size, each, recipe, False, "mixture") for size, each in ((2, EXPERTS), (4, (*SHARDS, *EXPERTS))) for recipe in ("fp32", "bf16")]


def _name(case: Case) -> str:
    dimensions, sequence, recipe, low, model = case
    return " ".join([*(f"{name} {size}" for name, size in dimensions), *(["rows"] * sequence), recipe, *(["gathered"] * low), model])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each process says of each case, by the number of processes."""
    found = {}
    for size, cases in CASES.items():
        each: list[Job] = [(_name(case), jobs.measured, (*case[:-1], MODELS[case[-1]])) for case in cases]
        each += [(f"{d} {r} {low} {of}", jobs.sent_for_parameters, (d, r, low, MODELS[of])) for s, d, r, low, of in FOR_PARAMETERS if s == size]
        each += [(f"stages {recipe}", jobs.measured_in_stages, (recipe,)) for recipe in IN_STAGES if size == 2]
        found[size] = run_jobs_once(tmp_path_factory, f"memory{size}", each, size)
    return found


def _derived(case: Case) -> tuple[Memory, int]:
    """What is derived, and the bytes of the logits of a process."""
    dimensions, sequence, name, low, model = case
    recipe, dtype = jobs.RECIPES[name]
    layout = Layout(**dict(dimensions), sequence_parallel=sequence, gather_quantized=low)
    logits = jobs.TOKENS * jobs.ARCHITECTURE.vocabulary // layout.tp * dtype.itemsize
    return memory(MODELS[model], layout, recipe, jobs.TOKENS, dtype), logits


@pytest.mark.parametrize(("size", "case"), [pytest.param(*each, id=f"{each[0]}: {_name(each[1])}") for each in ALL])
def test_what_is_measured_is_within_a_tenth_of_what_is_derived(measured: dict[int, list[dict[str, Any]]], size: int, case: Case) -> None:
    """Part by part, so that no error makes up for another. Of what is gathered from other processes some may have gone already when forward ends."""
    derived, logits = _derived(case)
    of_processes = check(measured[size], _name(case))
    dimensions, sequence, *_, model = case
    if model == "mixture" and (sequence or "ep" in dict(dimensions)):  # more tokens go to the experts of one than to another's
        of_processes = [{name: sum(found[name] for found in of_processes) / size for name in of_processes[0]}]
    for found in of_processes:
        assert found["weights"] == derived.weights
        assert found["gradients"] == pytest.approx(derived.gradients, rel=0.1)
        assert found["optimizer"] == pytest.approx(derived.optimizer, rel=1e-3)  # and a number for each parameter, of its steps
        own = derived.activations + derived.copies + logits
        assert 0.9 * own <= found["kept"] <= 1.1 * (own + derived.gathered)
        assert found["peak"] == pytest.approx(derived.peak, rel=0.1)


@pytest.mark.parametrize("recipe", IN_STAGES)
def test_so_it_is_in_stages(measured: dict[int, list[dict[str, Any]]], recipe: str) -> None:
    for stage, found in enumerate(check(measured[2], f"stages {recipe}")):
        chosen, dtype = jobs.RECIPES[recipe]
        derived = memory(jobs.ARCHITECTURE, Layout(pp=2), chosen, jobs.TOKENS, dtype, jobs.MICROBATCHES, stage)
        assert (found["weights"], found["gradients"]) == (derived.weights, derived.gradients)
        assert found["optimizer"] == pytest.approx(derived.optimizer, rel=1e-3)
        assert found["peak"] == pytest.approx(derived.peak, rel=0.1)


@pytest.mark.parametrize(("size", "dimensions", "recipe", "low", "model"), FOR_PARAMETERS)
def test_what_is_sent_for_parameters_is_what_is_derived(
    measured: dict[int, list[dict[str, Any]]], size: int, dimensions: Dimensions, recipe: str, low: bool, model: str
) -> None:
    """To the byte. Gradients pass in the dtype of activations, and so do parameters, unless they are gathered as the recipe quantizes them."""
    dtype = jobs.RECIPES[recipe][1]
    layout = Layout(**dict(dimensions), gather_quantized=low)
    derived = traffic(MODELS[model], layout, jobs.RECIPES[recipe][0], jobs.TOKENS, dtype)
    exchanged = sum(kind.count * exchanged_with_experts(MODELS[model], kind, layout, jobs.TOKENS, dtype) for kind in MODELS[model].kinds)
    for found in check(measured[size], f"{dimensions} {recipe} {low} {model}"):
        assert found == derived.dp_shard + derived.dp_replicate + derived.ep - exchanged


@pytest.mark.parametrize(("shards", "whole"), [(2, True), (4, True), (8, False), (3, False)])
def test_an_expert_is_gathered_in_8_bits_where_processes_have_whole_ones(shards: int, whole: bool) -> None:
    recipe, dtype = jobs.RECIPES["current"]
    layout, kind = Layout(dp_shard=shards, gather_quantized=True), jobs.MIXTURE.kinds[-1]
    assert kind.experts is not None
    parameters = 3 * jobs.MIXTURE.hidden * kind.experts.inner
    found = gathered("expert", jobs.MIXTURE, kind, layout, recipe, dtype, shards)
    assert found.nbytes == (parameters + 2 * 4 if whole else 2 * parameters)  # of each of two weights a scale


def test_two_blocks_that_follow_one_another_are_whole_at_once() -> None:
    recipe, dtype = jobs.RECIPES["bf16"]
    (dense, mixed), layout = jobs.MIXTURE.kinds, Layout(dp_shard=2)
    assert jobs.MIXTURE.order == [dense, mixed] * (jobs.MIXTURE.layers // 2)
    assert mixed.experts is not None
    models = replace(jobs.MIXTURE, experts=replace(mixed.experts, every=1)), jobs.MIXTURE
    each, every_other = (memory(of, layout, recipe, jobs.TOKENS, dtype).gathered for of in models)
    experts = mixed.experts.count * (3 * jobs.MIXTURE.hidden * mixed.experts.inner + jobs.MIXTURE.hidden)
    assert each - every_other == experts * dtype.itemsize
