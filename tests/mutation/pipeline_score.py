"""How many wrong pipelines the tests catch: ``python tests/mutation/pipeline_score.py --count 500 --seed 0 --out results.jsonl``.

First every test of ``TESTS`` is run once, and the lines are noted that it runs; then each mutation of a sample is judged by the tests that run its
lines, the quickest and most specific ones first. What is written to ``--out`` is kept, and not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pipeline_changes import FILES, ROOT, Mutation, changed_source, sample

__all__ = ["RUN_BY_IMPORTS", "TESTS", "Judge", "Server", "coverage", "equivalents", "judged", "nearest"]

TESTS = (
    "tests/unit/pipeline", "tests/unit/pytorch", "tests/unit/nvte", "tests/unit/quantized", "tests/unit/cpp/test_cpp_fingerprint.py",
    "tests/unit/tex/test_tex_kernel_calls.py", "tests/unit/tex/test_tex_policy_scope.py", "tests/conformance/ops",
    "tests/text/test_explain_blocks.py", "tests/text/test_errors_input.py", "tests/integration/test_state_*.py",
    "tests/integration/test_executor*.py", "tests/integration/test_pipeline_formats.py", "tests/integration/test_ops_*.py",
    "tests/integration/test_option_domains.py", "tests/integration/test_generate*.py", "tests/integration/test_extending.py",
)  # fmt: skip
"""Tests of the pipeline, and of what it is made of."""

RUN_BY_IMPORTS = ("fusions/add_activation.py", "fusions/high_precision.py", "fusions/registry.py")
"""Files that do their work while fusible is imported."""

_FIRST, _OF_A_LINE = 15, 8
_SECOND_CHANCE = 6
"""Times as many seconds of tests for a mutation that the first have not caught: of a line that every test runs, few tests may tell."""
_LONGEST = 3.0
"""Seconds of a test while its lines are noted; longer ones start processes, which would run the true source, or compilers."""


class Server:
    """A process of ``pipeline_server``, and what it answers. ``tests``: what a warm one has imported; a cold one nothing."""

    def __init__(self, tests: Iterable[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.log = Path(self._folder.name) / "log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | {"OMP_NUM_THREADS": "1"}
        found = [str(place.relative_to(ROOT)) for test in tests for place in sorted(ROOT.glob(test))]
        command = [sys.executable, str(Path(__file__).with_name("pipeline_server.py")), *found]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.communicate(timeout=60)
        self._folder.cleanup()

    def ask(self, limit: float, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({**request, "limit": limit, "log": str(self.log)}), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


def coverage(server: Server, files: Iterable[str] = FILES, tests: Iterable[str] = TESTS) -> dict[str, Any]:
    """Of each short test that passes: its seconds, and its lines by file."""
    paths = {str(ROOT / "src/fusible" / file): file for file in files}
    found: dict[str, Any] = {}
    for test in tests:
        for place in sorted(ROOT.glob(test)):
            for each in sorted(place.rglob("test_*.py")) if place.is_dir() else [place]:
                answer = server.ask(600, tests=[str(each.relative_to(ROOT))], files=list(paths))
                if "tests" not in answer:
                    print(f"{each.relative_to(ROOT)}: {answer['by']}", file=sys.stderr)
                    continue
                for name, row in answer["tests"].items():
                    lines = {paths[path]: numbers for path, numbers in row["lines"].items()}
                    if row["passed"] and lines and row["seconds"] < _LONGEST:
                        found[name] = {"seconds": row["seconds"], "lines": lines}
                failed = [name for name, row in answer["tests"].items() if not row["passed"]]
                print(f"{each.relative_to(ROOT)}: {len(answer['tests'])} tests, not passed: {failed}", file=sys.stderr)
    return found


def equivalents() -> dict[str, str]:
    """Mutations that no call tells from the true code, and why."""
    lines = Path(__file__).with_name("pipeline_equivalents.txt").read_text().splitlines()
    return dict(line.rsplit(" | ", 1) for line in lines)  # type: ignore[misc]


def nearest(mutation: Mutation, covered: dict[str, Any], most: float = 25.0) -> list[str]:
    """The tests that run a mutation's lines. The quickest, and those that run little else, come first; then some for each line of its function (what
    a changed condition leads to is often rare); after these each with one of its parameters before any with another. Of lines that are run by
    imports alone, those that run any of the file's. ``most``: seconds, by what they took while their lines were noted."""
    first, last = mutation.lines
    in_file = {name: lines for name, row in covered.items() if (lines := row["lines"].get(mutation.file))}
    on_lines = [name for name, lines in in_file.items() if any(first <= line <= last for line in lines)]
    costs = {name: covered[name]["seconds"] for name in on_lines or in_file}
    ordered = sorted(costs, key=lambda name: costs[name] * sum(map(len, covered[name]["lines"].values())))
    of_line = [[name for name in ordered if line in in_file[name]] for line in range(mutation.around[0], mutation.around[1] + 1)]
    rare = {name for names in of_line for name in names[:: len(names) // _OF_A_LINE or 1]}
    ranks: dict[str, tuple[int, int]] = {}
    times = Counter[str]()
    for name in ordered:
        function = name.partition("[")[0]
        ranks[name] = 0 if len(ranks) < _FIRST else 1 if name in rare else 2 + times[function], len(ranks)
        times[function] += 1
    chosen, seconds = [], 0.0
    for name in sorted(ranks, key=lambda name: ranks[name]):
        if chosen and seconds + costs[name] > most:
            break
        chosen.append(name)
        seconds += costs[name]
    return chosen


class Judge:
    """Says of mutations whether tests catch them. ``tests``: of these and no others; the larger they are, the longer it takes to begin."""

    def __init__(self, tests: Iterable[str] = TESTS) -> None:
        self._cold, self._warm = Server(), Server(tests)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: Any) -> None:
        self._cold.__exit__()
        self._warm.__exit__()

    def __call__(self, mutation: Mutation, tests: Sequence[str], limit: float = 60.0) -> dict[str, Any]:
        """``verdict``: 'caught', 'survived', or 'none ran'; ``by``: what caught it. ``limit``: seconds that they may compute."""
        stages = [list(tests[:8]), list(tests[8:40]), list(tests[40:])]
        request = {
            "path": str(ROOT / "src/fusible" / mutation.file),
            "text": changed_source(mutation),
            "stages": [stage for stage in stages if stage],
        }
        row: dict[str, Any] = {"verdict": "cold"}
        if mutation.file not in RUN_BY_IMPORTS:
            row = self._warm.ask(limit, **request)
        return self._cold.ask(limit, **request) if row["verdict"] == "cold" else row


def judged(judge: Judge, mutation: Mutation, covered: dict[str, Any], seconds: float = 25.0) -> dict[str, Any]:
    """What ``judge`` says by the nearest tests; of what these do not catch by more of them."""
    first = nearest(mutation, covered, seconds)
    row = judge(mutation, first)
    more = [test for test in nearest(mutation, covered, _SECOND_CHANCE * seconds) if test not in first] if row["verdict"] == "survived" else []
    return judge(mutation, more, limit=60.0 * _SECOND_CHANCE) if more else row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON for each mutation; those in it are not judged again")
    parser.add_argument("--coverage", type=Path, required=True, help="where the lines of the tests are kept; made where it is missing")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop then")
    parser.add_argument("--seconds", type=float, default=25.0, help="of tests for one mutation, by what they took while their lines were noted")
    parser.add_argument("--again", action="store_true", help="judge anew those that survived")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    if not options.coverage.exists():
        with Server() as server:
            options.coverage.write_text(json.dumps(coverage(server)))
    with Judge() as judge:
        covered = json.loads(options.coverage.read_text())
        rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
        known = {row["mutation"]: row for row in rows}
        same = equivalents()
        chosen = [mutation for mutation in sample(options.count, options.seed) if str(mutation) not in same]
        for mutation in chosen:
            name = str(mutation)
            if time.monotonic() > end:
                break
            if name in known and (known[name]["verdict"] == "caught" or not options.again):
                continue
            start = time.monotonic()
            row = judged(judge, mutation, covered, options.seconds)
            known[name] = {"mutation": name, "lines": mutation.lines, "seconds": round(time.monotonic() - start, 1), **row}
            with options.out.open("a") as file:
                print(json.dumps(known[name]), file=file)
            print(f"{row['verdict']:9} {known[name]['seconds']:5} s {row['ran']:4} {name}  by {row['by']}", flush=True)
    rows = [known[name] for name in map(str, chosen) if name in known]
    caught = sum(row["verdict"] == "caught" for row in rows)
    print(f"{options.count - len(chosen)} equivalent, {len(rows)} of {len(chosen)} judged, {caught} caught ({caught / max(len(rows), 1):.1%})")


if __name__ == "__main__":
    main()
