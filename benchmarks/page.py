"""The tables of ``docs/performance.md`` and the figures of the README, from the results that ``benchmarks/results`` keeps.

``python -m benchmarks.page`` writes them between the marks ``<!-- table NAME -->`` and ``<!-- end -->`` of both pages; ``--check`` writes nothing,
and fails where a page says something else than the results do.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

__all__ = ["main", "refreshed"]

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/performance.md")

Row = Sequence[str]


@cache
def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def _number(value: float) -> str:
    """Three figures, and none behind a hundred."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 1 else f"{value:.2f}"


def _table(head: Row, rows: Iterable[Row]) -> list[str]:
    """Markdown: the first column is words, the others are figures."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---", *["---:"] * (len(head) - 1)], *rows)]


def beside_torch(table: str, unit: str = "ms", file: str = "cpu-2-cores-kernels") -> list[str]:
    """A table of ``fusible bench``, beside torch or what else it says. Of times and rates the last column is how many times as fast Fusible is, of
    bytes the share that it takes."""
    found = results(file)["tables"][table]
    rows = [row for row in found["rows"] if row["unit"] == unit]
    ratio = "of torch's" if unit == "MB" else "times as fast"
    return _table(
        ["", f"{found.get('beside', 'torch')}, {unit}", f"Fusible, {unit}", ratio],
        [[row["what"], _number(row["torch"]), _number(row["fusible"]), _number(row["ratio"])] for row in rows],
    )


def measured(table: str, file: str = "cpu-2-cores") -> list[str]:
    """A table of ``make bench`` as it stands: a column a figure, in the unit that its name ends in."""
    rows = results(file)[table]
    head = list(rows[0])
    return _table(
        ["", *[re.sub(r"_(us|ms|s)$", r", \1", name).replace("_", " ") for name in head[1:]]],
        [[row[head[0]], *["-" if row[name] != row[name] else _number(row[name]) for name in head[1:]]] for row in rows],
    )


def by_contestant(table: str, file: str) -> list[str]:
    """A table of ``benchmarks.gpu`` in ms: a row for each contestant, a column for each size."""
    rows = results(file)[table]
    size, *names = rows[0]
    return _table(["", *[row[size] for row in rows]], [[name.removesuffix("_ms"), *[_number(row[name]) for row in rows]] for name in names])


def _over_bf16(losses: dict[str, dict[str, float]], recipe: str) -> list[float]:
    """By seed, the held-out loss over that of bf16 from the same seed, in per cent."""
    return [100 * (loss / losses["bf16"][seed] - 1) for seed, loss in losses[recipe].items()]


def quality(what: str) -> list[str]:
    """A table of ``benchmarks.quality``."""
    losses = results("cpu-2-cores-quality")[what]
    found = {recipe: _over_bf16(losses, recipe) for recipe in losses if recipe != "bf16"}
    rows = [[f"`{recipe}`", f"{mean(each):.2f} %", f"{stdev(each):.2f}", str(len(each))] for recipe, each in found.items()]
    return _table(["", "mean over bf16", "standard deviation", "seeds"], rows)


def machines() -> list[str]:
    """What the results were measured on."""
    rows = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        machine = results(path.stem)["machine"]
        link = f"[{path.name}](../benchmarks/results/{path.name})"
        rows.append([link, machine.get("gpu", machine["cpu"]), str(machine["threads"]), machine["level"], machine["torch"], machine["python"]])
    return _table(["", "processor", "threads", "kernels", "torch", "Python"], rows)


def _of(table: str, what: str) -> float:
    (row,) = [row for row in results("cpu-2-cores-kernels")["tables"][table]["rows"] if row["what"] == what]
    return row["ratio"]


def front() -> list[str]:
    """The six figures of the README."""
    (mlp,) = results("cpu-2-cores")["lazy_calls"]
    losses = results("cpu-2-cores-quality")["losses"]
    costs = [_over_bf16(losses, recipe) for recipe in ("delayed", "current", "mxfp8", "block")]
    seeds = min(map(len, costs))
    step = _of("training", "GPT 4 x 128, 2048 tokens, AdamW: delayed, beside torch")
    product = _of("gemm", "2048^3, TN, torch in FP8 (_scaled_mm)")
    rows = [
        ["a training step of the demo's GPT in FP8, beside torch in bf16", f"{step:.1f} times as fast"],
        ["decoding with a model of 1.1 billion parameters, one sequence", f"{_of('generation', 'batch 1: decoding'):.1f} times as many tokens"],
        ["its weights and its cache", f"{_of('generation', 'batch 1: weights and cache'):.2f} of the memory"],
        ["an FP8 product of 2048 x 2048 x 2048, beside `torch._scaled_mm`", f"{product:.1f} times as fast"],
        ["a call of a small MLP that `fusible.lazy` compiled", f"{mlp['ratio']:.2f} of `jax.jit`'s time"],
        [
            f"what 8 bits cost in held-out loss: delayed, current, MXFP8, blocks; means and standard deviations of {seeds} seeds",
            ", ".join(f"{mean(each):.2f} ± {stdev(each):.2f}" for each in costs) + " %",
        ],
    ]
    return _table(["", "two x86-64 cores"], rows)


TABLES: dict[str, Callable[..., list[str]]] = {
    "beside torch": beside_torch,
    "by contestant": by_contestant,
    "front": front,
    "machines": machines,
    "measured": measured,
    "quality": quality,
}
_MARKED = re.compile(r"(<!-- table ([^:]+?)(?:: (.+?))? -->\n).*?(<!-- end -->)", re.DOTALL)


def refreshed(text: str) -> str:
    """A page with its tables as the results have them."""

    def table(match: re.Match[str]) -> str:
        arguments = match[3].split(", ") if match[3] else []
        return "\n".join([match[1], *TABLES[match[2]](*arguments), "", match[4]])

    return _MARKED.sub(table, text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where a page would change")
    options = parser.parse_args()
    changed = []
    for name in PAGES:
        path = ROOT / name
        text = path.read_text()
        now = refreshed(text)
        if now != text:
            changed.append(name)
            if not options.check:
                path.write_text(now)
    if options.check and changed:
        sys.exit(f"{', '.join(changed)}: expected the figures of benchmarks/results, got others; run python -m benchmarks.page")


if __name__ == "__main__":
    main()
