"""Modules by NVIDIA's names that two processes share, against NVIDIA's own in the same two: outputs and gradients of each process."""

from __future__ import annotations

import importlib.util
import multiprocessing
from typing import Any

import parallel_cases
import pytest
import te_parallel_jobs
import torch

Parts = list[dict[str, Any]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """What each process found: one start of two processes for all tests."""
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("NVIDIA's Python package is not installed")
    folder = tmp_path_factory.mktemp("te_parallel")
    jobs = [(f"{name}, {recipe}", te_parallel_jobs.compared, (name, recipe)) for name, recipe in te_parallel_jobs.JOBS]
    context = multiprocessing.get_context("spawn")
    arguments = [(rank, str(folder / "meeting"), str(folder / f"rank{rank}"), jobs) for rank in range(parallel_cases.SIZE)]
    processes = [context.Process(target=parallel_cases.worker, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes)
    return [torch.load(folder / f"rank{rank}", weights_only=True) for rank in range(parallel_cases.SIZE)]


@pytest.mark.parametrize(("name", "recipe"), te_parallel_jobs.JOBS)
def test_a_shared_module_computes_what_nvidias_does(parts: Parts, name: str, recipe: str) -> None:
    for rank, results in enumerate(parts):
        assert results[f"{name}, {recipe}"] is True, f"rank {rank}:\n{results[f'{name}, {recipe}']}"
