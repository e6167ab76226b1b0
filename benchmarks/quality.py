"""What a recipe costs in quality: the demo's model at a smaller size, trained from several seeds under each recipe, beside bf16 from the same seeds.

``python -m benchmarks.quality`` takes hours in NVFP4, and minutes in the other recipes; what is in the file of ``--json`` is not run again.
``--bf16-layers`` and ``--fp8-format`` are those of ``fusible train``; a recipe under them has a row of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rich.console import Console

from benchmarks.run import show
from fusible.cli.bench.machine import describe_machine
from fusible.cli.training.options import TrainOptions
from fusible.cli.training.text import read_text
from fusible.cli.training.trainer import Trainer

__all__ = ["differences", "forward_alone", "held_out", "main"]

SIZE: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 64, "batch": 16}
BASELINE = "bf16"
RECIPES = (BASELINE, "fp32", "delayed", "current", "mxfp8", "block", "nvfp4")


Losses = Iterator[tuple[str, float]]
"""Recipes, each with the held-out loss in nats per byte."""


def _trained(options: TrainOptions, recipe: str) -> Trainer:
    trainer = Trainer(options, recipe, read_text(None, options.seq_len))
    for _ in range(options.steps):
        trainer.step()
    return trainer


def held_out(recipes: Sequence[str], options: TrainOptions) -> Losses:
    """After training under each recipe."""
    return ((recipe, _trained(options, recipe).held_out_loss()) for recipe in recipes)


def forward_alone(recipes: Sequence[str], options: TrainOptions) -> Losses:
    """After training in bf16, evaluated under each recipe: what its forward roundings cost without any in training."""
    trained = _trained(options, BASELINE) if recipes else None
    for recipe in recipes:
        assert trained is not None
        other = Trainer(options, recipe, trained.text)
        other.model.load_state_dict(trained.model.state_dict())
        for step in range(3):  # for delayed scaling to have seen the tensors: nothing is written to the weights
            other.model.loss(*trained.text.batch(options.seed, step, options.batch, options.seq_len)).backward()
        yield recipe, other.held_out_loss()


def differences(losses: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """A row a recipe: the mean loss, the mean difference to bf16 from the same seed in per cent, and the spread of these differences."""
    rows = []
    for recipe, by_seed in losses.items():
        seeds = [seed for seed in by_seed if seed in losses.get(BASELINE, {})]
        apart = [100 * (by_seed[seed] / losses[BASELINE][seed] - 1) for seed in seeds]
        row = {"recipe": recipe, "seeds": len(by_seed), "held-out": mean(by_seed.values())}
        spread = stdev(apart) if len(apart) > 1 else float("nan")
        rows.append({**row, "% over bf16": mean(apart) if apart else float("nan"), "spread": spread, "largest": max(apart, default=float("nan"))})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("recipes", nargs="*", default=RECIPES, help="the recipes to train under (default: all)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--bf16-layers", default="", help="as of fusible train")
    parser.add_argument("--fp8-format", help="as of fusible train")
    parser.add_argument("--forward-alone", action="store_true", help="evaluate a model trained in bf16 under the recipes, and train none under them")
    parser.add_argument("--json", type=Path, help="keep the losses in this file, and take those that it has")
    options = parser.parse_args()
    run: dict[str, Any] = {"size": SIZE, "steps": options.steps}
    had: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else dict(run)
    had.pop("machine", None)
    if any(had[name] != value for name, value in run.items()):
        parser.error(f"{options.json} has losses of {had['steps']} steps at the size {had['size']}, not of {run}: name another file")
    what = "forward alone" if options.forward_alone else "losses"
    losses: dict[str, dict[str, float]] = had.setdefault(what, {})
    precision = {"bf16_layers": tuple(filter(None, options.bf16_layers.split(","))), "fp8_format": options.fp8_format}
    changed = "".join(f" --{name} {value}" for name, value in (("bf16-layers", options.bf16_layers), ("fp8-format", options.fp8_format)) if value)
    for seed in range(options.seeds):
        wanted = [recipe for recipe in options.recipes if str(seed) not in losses.setdefault(f"{recipe}{changed}", {})]
        chosen = TrainOptions(recipes=RECIPES, steps=options.steps, decay_steps=options.steps, seed=seed, **precision, **SIZE)
        for recipe, loss in (forward_alone if options.forward_alone else held_out)(wanted, chosen):
            losses[f"{recipe}{changed}"][str(seed)] = loss
            if options.json:
                options.json.write_text(json.dumps({"machine": describe_machine(), **run, **had}, indent=2) + "\n")
    show(Console(), "quality", f"held-out nats per byte after {options.steps} steps; {what}", differences(losses))


if __name__ == "__main__":
    main()
