"""The fused optimizers over ``DTensor`` parameters: FSDP2 models in two processes against one process."""

from __future__ import annotations

import multiprocessing
from typing import Any

import parallel_cases
import pytest
import torch
from sharded_optimizer_jobs import JOBS


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process says of every job: one start of two processes for all tests."""
    folder = tmp_path_factory.mktemp("sharded")
    jobs = [(name, function, ()) for name, function in JOBS.items()]
    context = multiprocessing.get_context("spawn")
    arguments = [(rank, str(folder / "meeting"), str(folder / f"rank{rank}"), jobs) for rank in range(parallel_cases.SIZE)]
    processes = [context.Process(target=parallel_cases.worker, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes)
    return [torch.load(folder / f"rank{rank}", weights_only=True) for rank in range(parallel_cases.SIZE)]


@pytest.mark.parametrize("name", JOBS)
def test_sharded(results: list[dict[str, Any]], name: str) -> None:
    for rank, found in enumerate(results):
        assert not isinstance(found[name], str), f"rank {rank}:\n{found[name]}"
