"""``fusible scale``: the best layouts of a model on many GPUs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from rich.console import Console

from fusible.cli.console import make_console, make_table
from fusible.cli.training.model import RECIPES_BY_NAME
from fusible.distributed.cost import ARCHITECTURES, H100, Candidate, best_layouts
from fusible.errors import ArgumentError, expected

__all__ = ["scale", "show"]


def scale(given: argparse.Namespace) -> int:
    """The job of ``fusible scale``."""
    for option, value, known in (("--model", given.model, ARCHITECTURES), ("--recipe", given.recipe, RECIPES_BY_NAME)):
        if value not in known:
            *names, last = known
            raise ArgumentError(expected(f"{', '.join(names)} or {last}", of=option, got=repr(value), do="name one of these"))
    for option, value in (("--gpus", given.gpus), ("--seq-len", given.seq_len), ("--batch", given.batch), ("--rows", given.rows)):
        if value < 1:
            raise ArgumentError(expected("at least 1", of=option, got=value, do="give a larger number"))
    recipe, dtype = RECIPES_BY_NAME[given.recipe]
    batch = given.seq_len * given.batch
    found = best_layouts(ARCHITECTURES[given.model], given.gpus, recipe, sequence=given.seq_len, batch=batch, dtype=dtype, count=given.rows)
    if given.json:
        print(json.dumps({"model": given.model, "gpus": given.gpus, "recipe": given.recipe, "layouts": [as_json(one) for one in found]}, indent=1))
    else:
        show(
            found,
            f"{given.model} on {given.gpus:,} x {H100.name} in {given.recipe}, {given.batch:,} sequences of {given.seq_len:,} tokens",
            make_console(),
        )
    return 0


def as_json(one: Candidate) -> dict[str, Any]:
    """A candidate as an object of JSON."""
    memory = {**asdict(one.memory), "peak": one.memory.peak}
    time = {**asdict(one.time), "total": one.time.total, "hidden": one.time.hidden, "tokens_per_second": one.time.tokens_per_second}
    return {**asdict(one), "memory": memory, "time": time}


def show(found: list[Candidate], title: str, console: Console) -> None:
    """Print candidates, the best first, and the best in a sentence."""
    table = make_table("layout", ">micro-batches", ">GB sent", ">GB held", ">exposed", ">waiting", ">tokens/s of a GPU", title=title)
    for one in found:
        total = one.time.total
        exposed = sum(one.time.exposed.values())
        figures = f"{one.traffic.total / 1e9:,.1f}", f"{one.memory.peak / 1e9:,.1f}", f"{exposed / total:.1%}", f"{one.time.bubble / total:.1%}"
        table.add_row(str(one.layout), one.batches, *figures, f"{one.time.tokens_per_second:,.0f}")
    console.print(table)
    best = found[0]
    console.print(f"The best layout: {best.layout}. A step takes {best.time.total:.2f} s; {best.time.hidden:.0%} of what is sent is hidden.")
