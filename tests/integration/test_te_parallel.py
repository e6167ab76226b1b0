"""Modules by NVIDIA's names that two processes share, against NVIDIA's own in the same two, and those against the whole in one: outputs and
gradients of each process."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import te_parallel_jobs
import te_whole_jobs
from process_group import run_jobs_once

Parts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """What each process found: one start of two processes for all tests."""
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("NVIDIA's Python package is not installed")
    jobs = [(f"{name}, {recipe}", te_parallel_jobs.compared, (name, recipe)) for name, recipe in te_parallel_jobs.JOBS]
    jobs += [(f"{job} whole", te_whole_jobs.beside_whole, job) for job in te_whole_jobs.JOBS]
    return run_jobs_once(tmp_path_factory, "te_parallel", jobs)


@pytest.mark.parametrize(("name", "recipe"), te_parallel_jobs.JOBS)
def test_a_shared_module_computes_what_nvidias_does(parts: Parts, name: str, recipe: str) -> None:
    for rank, results in enumerate(parts):
        assert results[f"{name}, {recipe}"] is True, f"rank {rank}:\n{results[f'{name}, {recipe}']}"


@pytest.mark.parametrize("job", te_whole_jobs.JOBS, ids=lambda job: f"{job[0]}, {'rows' if job[1] else 'columns'}, {job[2]}")
def test_nvidias_module_in_two_processes_computes_what_it_does_in_one(parts: Parts, job: tuple[str, bool, str]) -> None:
    for rank, results in enumerate(parts):
        assert results[f"{job} whole"] is True, f"rank {rank}:\n{results[f'{job} whole']}"
