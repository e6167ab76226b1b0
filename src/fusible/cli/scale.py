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


def scale(arguments: argparse.Namespace) -> int:
    """The job of ``fusible scale``."""
    for option, value, known in (("--model", arguments.model, ARCHITECTURES), ("--recipe", arguments.recipe, RECIPES_BY_NAME)):
        if value not in known:
            *names, last = known
            raise ArgumentError(expected(f"{', '.join(names)} or {last}", of=option, got=repr(value), do="name one of these"))
    for option, value in (("--gpus", arguments.gpus), ("--seq-len", arguments.seq_len), ("--batch", arguments.batch), ("--rows", arguments.rows)):
        if value < 1:
            raise ArgumentError(expected("at least 1", of=option, got=value, do="give a larger number"))
    recipe, dtype = RECIPES_BY_NAME[arguments.recipe]
    batch = arguments.seq_len * arguments.batch
    found = best_layouts(
        ARCHITECTURES[arguments.model], arguments.gpus, recipe, sequence=arguments.seq_len, batch=batch, dtype=dtype, count=arguments.rows
    )
    if arguments.json:
        print(
            json.dumps(
                {"model": arguments.model, "gpus": arguments.gpus, "recipe": arguments.recipe, "layouts": [as_json(one) for one in found]}, indent=1
            )
        )
    else:
        show(
            found,
            f"{arguments.model} on {arguments.gpus:,} x {H100.name} in {arguments.recipe}, "
            f"{arguments.batch:,} sequences of {arguments.seq_len:,} tokens",
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
    if best.layout.gather_quantized:
        console.print("Weights are gathered as the recipe quantizes them (fusible.distributed.gather_quantized).")
