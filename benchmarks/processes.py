"""Steps of ``fusible train`` by two processes of one thread each, beside one process of two threads. ``python -m benchmarks.processes`` takes sizes
that need no time: its figures say nothing of speed."""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fusible.cli.training.options import TrainOptions
from fusible.cli.training.ranks import Layout, Ranks
from fusible.cli.training.text import read_text
from fusible.cli.training.trainer import Trainer
from fusible.machine import keep_freed_memory

__all__ = ["processes"]

LAYOUTS = {
    "data": (Layout(data=2), 1),
    "columns": (Layout(tensor=2), 1),
    "columns and rows": (Layout(tensor=2, sequence=True), 1),
}
ALONE = {"two threads": (Layout(), 2), "one thread": (Layout(), 1)}
"""What the processes share, and the threads of each."""
RECIPES = ("bf16", "delayed")
DEMO = TrainOptions()
WARM_UP, STEPS, ROUNDS = 4, 8, 9
"""The first step of a process plans, the second records; a round has some steps of each contestant."""


def processes(options: TrainOptions = DEMO, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Milliseconds of a step of the demo by two processes of one thread each, beside one of two threads. Target: 0.85 times as fast at least.

    ``one_thread_ms``: of the whole step by one thread, of which half is the least that two processes can take. ``messages`` and ``messages_ms``: in
    how many messages one of the two takes part, and how long they take, waiting for the other included; those of ``data`` run beside backward.
    """
    return [row for recipe in RECIPES for row in _compared(options, recipe, rounds)]


def _compared(options: TrainOptions, recipe: str, rounds: int) -> list[dict[str, Any]]:
    """All take turns, so that other work on the machine slows all of them alike."""
    with ExitStack() as stack:
        contestants = {name: stack.enter_context(_trainers(options, recipe, *each)) for name, each in {**ALONE, **LAYOUTS}.items()}
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for group in contestants.values():
            _steps(group, WARM_UP)
        for _ in range(rounds):
            for name, group in contestants.items():
                times[name].append(1e3 * _steps(group, STEPS) / STEPS)
        sent = {name: _asked(contestants[name], "messages")[0] for name in LAYOUTS}
    found = {name: statistics.median(each) for name, each in times.items()}
    return [
        {
            "two processes share": f"{name}, {recipe}",
            "one_process_ms": found["two threads"],
            "two_processes_ms": found[name],
            "times_as_fast": found["two threads"] / found[name],
            "one_thread_ms": found["one thread"],
            "messages": sent[name][0],
            "messages_ms": 1e3 * sent[name][1],
        }
        for name in LAYOUTS
    ]


def _steps(group: list[Connection], count: int) -> float:
    """The seconds of some steps, of the process that took longest."""
    return max(_asked(group, count))


def _asked(group: list[Connection], what: Any) -> list[Any]:
    for end in group:
        end.send(what)
    return [end.recv() for end in group]


@contextmanager
def _trainers(options: TrainOptions, recipe: str, layout: Layout, threads: int) -> Iterator[list[Connection]]:
    """Processes that train together, and wait without computing while they are not asked to."""
    context, world = multiprocessing.get_context("spawn"), layout.tensor * layout.data
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["KINETO_LOG_LEVEL"] = "99"  # torch's profiler says that it finds no GPU
    ends, started = [], []
    for rank in range(world):
        own, theirs = context.Pipe()
        started.append(context.Process(target=_train, args=(theirs, options, recipe, layout, threads, rank, world, port), daemon=True))
        started[-1].start()
        ends.append(own)
    try:
        yield ends
    finally:
        for end in ends:
            end.send(None)
        for process in started:
            process.join()


def _train(asked: Connection, options: TrainOptions, recipe: str, layout: Layout, threads: int, rank: int, world: int, port: int) -> None:
    keep_freed_memory()  # as the command does
    torch.set_num_threads(threads)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    ranks = Ranks(rank, world)
    ranks.begin(layout, {"recipe": recipe})
    trainer = Trainer(options, recipe, read_text(None, options.seq_len), ranks)

    def steps(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            ranks.any(False)
            ranks.reached(f"step {trainer.record.step + 1}")
            trainer.step()
        return time.perf_counter() - began

    while (what := asked.recv()) is not None:
        asked.send(_messages(lambda: steps(STEPS)) if what == "messages" else steps(what))
    ranks.end()


def _messages(steps: Callable[[], object]) -> tuple[float, float]:
    """The number of collectives of a step, and the seconds that they take."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        steps()
    found = [event for event in profiler.events() if event.name.startswith("gloo:")]
    return len(found) / STEPS, sum(event.time_range.elapsed_us() for event in found) / 1e6 / STEPS


if __name__ == "__main__":
    tiny = TrainOptions(steps=1000, layers=1, hidden=32, heads=2, seq_len=16, batch=4)
    for row in processes(tiny, rounds=2):
        print(row)
