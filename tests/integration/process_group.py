"""Starting a group of processes once for many checks, each of which runs in every process."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

_LIMIT = 900.0
"""Seconds in which another worker's processes have ended."""
_LOADED = [
    "fusible.distributed",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
]
"""What jobs import that takes seconds: once, in a process from which theirs are forked."""
Job = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""A name, a function, and its first arguments; the last is the rank."""


def run_jobs(folder: Path, jobs: Sequence[Job], size: int = 2) -> list[dict[str, Any]]:
    """What ``size`` processes say of every job, by its name: a result, or a failure's text."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED)
    arguments = [(rank, size, str(folder / "meeting"), str(folder / f"rank{rank}"), jobs) for rank in range(size)]
    processes = [context.Process(target=_worker, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes)
    return _said(folder, size)


def run_jobs_once(factory: pytest.TempPathFactory, name: str, jobs: Sequence[Job], size: int = 2) -> list[dict[str, Any]]:
    """``run_jobs`` for all workers of a test run: the first that asks starts the processes, and the others wait for what these find."""
    own = factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    ended, began = folder / "ended", time.monotonic()
    try:
        folder.mkdir()
    except FileExistsError:
        while not ended.exists() and time.monotonic() - began < _LIMIT:
            time.sleep(0.1)
        return _said(folder, size)
    try:
        return run_jobs(folder, jobs, size)
    finally:
        ended.touch()


def _said(folder: Path, size: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank{rank}", weights_only=True) for rank in range(size)]


def check(results: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """What each process says of a job. Raises ``AssertionError`` with the text of one that failed."""
    for rank, found in enumerate(results):
        assert not isinstance(found[name], str), f"rank {rank}:\n{found[name]}"
    return [found[name] for found in results]


def _worker(rank: int, size: int, meeting: str, out: str, jobs: Sequence[Job]) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # of what was imported nothing is garbage, and each search among it takes a third of a second
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    results: dict[str, Any] = {}
    for name, function, arguments in jobs:
        try:
            results[name] = function(*arguments, rank)
        except Exception:
            results[name] = traceback.format_exc()
    torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # a group that a cycle holds has threads, which may not outlive the interpreter
