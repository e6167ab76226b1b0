"""The fused optimizers over ``DTensor`` parameters: FSDP2 models in two processes against one process."""

from __future__ import annotations

from typing import Any

import pytest
from process_group import check, run_jobs_once
from sharded_optimizer_jobs import JOBS


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process says of every job: one start of two processes for all tests."""
    return run_jobs_once(tmp_path_factory, "sharded", [(name, function, ()) for name, function in JOBS.items()])


@pytest.mark.parametrize("name", JOBS)
def test_sharded(results: list[dict[str, Any]], name: str) -> None:
    check(results, name)
