"""The tests catch wrong pipelines: plans, fusions, scaling state, weights' 8-bit copies and replay, with one change in their source."""

from __future__ import annotations

import ast

import pytest
from pipeline_changes import FILES, ROOT, Mutation, changed_source, mutations, sample
from pipeline_score import Judge, Server, coverage, equivalents, judged, nearest

PLANS = "tests/unit/pipeline/test_pipeline_plans.py"
PLANTED = {
    "a fusion of wrong ops": (
        "fusions/registry.py", "Fusion.matches", "type(op) in allowed -> NotIn", f"{PLANS}::test_the_longest_fusion_wins_at_its_leftmost_place", True
    ),
    "a plan that is never found again": (
        "compute_pipeline/pipeline.py", "ComputePipeline.plan", "plan is None -> IsNot", f"{PLANS}::test_a_plan_is_made_once_per_request", True
    ),
    "two numbers that are compared in the other order": (
        "compute_pipeline/plan.py", "_segments", "min(i - cuts[-1], len(ops) - i) -> first two swapped", PLANS, False
    ),
}  # fmt: skip
"""File, function, change, tests, and whether these catch it."""


def found(file: str, function: str, what: str) -> Mutation:
    (mutation,) = [m for m in mutations(file)[f"{file} {function}"] if m.what == what]
    return mutation


def test_wrong_pipelines_are_caught_and_equal_ones_are_not() -> None:
    """In children of one process that has imported fusible, and of one that has not; a test that is gone is not taken for one that passes."""
    with Judge([PLANS]) as judge:
        for name, (file, function, what, tests, is_caught) in PLANTED.items():
            row = judge(found(file, function, what), [tests] if "::" in tests else names_in(tests))
            assert row["verdict"] == ("caught" if is_caught else "survived") and row["ran"], (name, row)
        assert judge(found(*PLANTED["a fusion of wrong ops"][:3]), [f"{PLANS}::test_that_is_gone"])["verdict"] == "none ran"


def names_in(file: str) -> list[str]:
    """Of a file whose tests have no parameters."""
    body = ast.parse((ROOT / file).read_text()).body
    return [f"{file}::{node.name}" for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def test_a_mutation_is_judged_by_the_tests_that_run_its_lines() -> None:
    mutation = Mutation("a.py", "f", 0, "", (3, 4), (3, 4))
    rows = {"elsewhere": [1, 5], "slow": [4], "broad": [1, 2, 3, 5, 6, 7], "near": [3]}
    covered = {name: {"seconds": 9.0 if name == "slow" else 1.0, "lines": {"a.py": lines}} for name, lines in rows.items()}
    assert nearest(mutation, covered) == ["near", "broad", "slow"]
    assert nearest(Mutation("a.py", "f", 0, "", (8, 8), (8, 8)), covered) == ["near", "elsewhere", "broad", "slow"]


def test_what_a_changed_condition_leads_to_is_run_first() -> None:
    """The few tests that run a rare line of the function come before the many that run its first, however long they take."""
    often = {f"often {i:02}": {"seconds": 0.1, "lines": {"a.py": [1, 2]}} for i in range(80)}
    seldom = {"seldom": {"seconds": 2.0, "lines": {"a.py": [1, 2, 3]}}}
    chosen = nearest(Mutation("a.py", "f", 0, "", (2, 2), (1, 3)), {**often, **seldom})
    assert "seldom" in chosen[:40] and len(chosen) == 81


def test_every_file_has_mutations_that_tell_and_a_sample_takes_of_each() -> None:
    """A change is a change: no two of a file give the same text, and none gives the file as it is."""
    for file in ("pytorch/engine/scaling.py", "compute_pipeline/sides.py"):
        texts = [changed_source(m) for each in mutations(file).values() for m in each]
        assert len(texts) > 50 and ast.unparse(ast.parse((ROOT / "src/fusible" / file).read_text())) not in texts
    chosen = sample(400, 3)
    assert len(set(map(str, chosen))) == 400 and {m.file for m in chosen} == {file for file in FILES if mutations(file)}
    assert sample(30, 3) == chosen[:30]


def test_the_listed_equivalents_are_mutations_each_with_a_reason() -> None:
    every = {str(mutation) for file in FILES for of_function in mutations(file).values() for mutation in of_function}
    assert equivalents().keys() <= every and all(equivalents().values())


@pytest.mark.slow
def test_of_a_sample_of_wrong_pipelines_all_but_a_few_are_caught() -> None:
    """Of those that are not listed as equal to the true one, 95 %, but for the luck of so small a sample: two standard deviations of it.
    Of 500 it is 95 %, which takes ``pipeline_score.py`` two hours. Of the listed ones, in the sample, none may be caught.

    The seed is one whose sample nobody had looked at when it was written down here: on one that tests were written for, the share says nothing."""
    same, chosen = equivalents(), sample(60, 1128)
    with Server() as server:
        covered = coverage(server)
    with Judge() as judge:
        verdicts = {str(mutation): judged(judge, mutation, covered)["verdict"] for mutation in chosen}
    missed = [name for name, verdict in verdicts.items() if verdict != "caught" and name not in same]
    others = sum(name not in same for name in verdicts)
    print(f"{len(chosen)} mutations, {len(chosen) - others} of them equivalent; of the others {len(missed)} not caught:", *missed, sep="\n")
    assert len(missed) <= 0.05 * others + 2 * (0.05 * 0.95 * others) ** 0.5
    assert not [name for name, verdict in verdicts.items() if verdict == "caught" and name in same]
