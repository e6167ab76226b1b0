"""A formula is written once: files of one name in the backends of torch's and of lazy tensors have next to nothing in common."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

from doc_pages import ROOT

BACKENDS = ROOT / "src" / "fusible" / "tex" / "backends"
LEAST = 12
"""Of files with fewer lines no share is told: a formula that is all of a step leaves a line or two."""


def formulas(source: str) -> list[str]:
    """The lines of code that compute: not what is imported and exported, nor signatures, which a formula and its framework agree on."""
    dropped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"):
            dropped.update(range(node.lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            dropped.update(range(first, node.body[0].lineno))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            dropped.update(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = (line.strip() for i, line in enumerate(source.splitlines(), 1) if i not in dropped)
    return [line for line in lines if not line.startswith("#") and any(map(str.isalnum, line))]


def in_common(one: list[str], other: list[str]) -> int:
    """How many lines two files have in common, in the same order."""
    return sum(block.size for block in difflib.SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks())


def twins() -> dict[str, tuple[int, int]]:
    """Of each name that both backends have a file of: the lines in common, and those of the smaller file."""
    found = {}
    for path in sorted((BACKENDS / "torch_backend").glob("*.py")):
        other = BACKENDS / "xla" / path.name
        if other.exists():
            pair = [formulas(each.read_text()) for each in (path, other)]
            found[path.name] = in_common(*pair), min(map(len, pair))
    return found


def test_twins_have_next_to_nothing_in_common() -> None:
    found = twins()
    assert len(found) > 20
    shared, lines = (sum(counts) for counts in zip(*found.values(), strict=True))
    assert shared < 0.1 * lines, found


def test_no_twin_repeats_a_quarter_of_the_other() -> None:
    alike = {name: counts for name, counts in twins().items() if counts[1] >= LEAST and counts[0] > 0.25 * counts[1]}
    assert alike == {}


def test_a_formula_that_is_copied_is_seen(tmp_path: Path) -> None:
    source = (BACKENDS / "torch_backend" / "attention_walk.py").read_text()
    assert in_common(formulas(source), formulas(source)) == len(formulas(source)) > 40
    assert formulas('"""A file."""\n\nimport torch\n\n\ndef f(x: int) -> int:\n    """Of x."""\n    return (\n        x\n    )\n') == [
        "return (",
        "x",
    ]
