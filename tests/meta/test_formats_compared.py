"""Nothing asks a number format or a quantization scheme for its name: what is to depend on it is said by the format (``fusible.tex.formats``).

``fusible.lazy`` knows no formats of ``tex``: its ``"float8"`` is a kind of element, as its ``"int"`` is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from doc_pages import ROOT

from fusible.tex.formats import format as values

SOURCE = ROOT / "src" / "fusible"
OWN = ("tex/formats/", "lazy/")
NAMES = {*values._FORMATS_BY_NAME, *values._SCHEMES_BY_NAME} - {"none"}


def named(node: ast.expr) -> bool:
    """Whether a side of a comparison is the name of a format, or lists one."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return any(isinstance(part, ast.Constant) and part.value in NAMES for part in parts)


def comparisons(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        compared = isinstance(node, ast.Compare) and any(map(named, (node.left, *node.comparators)))
        asked = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("startswith", "endswith")
        matched = isinstance(node, ast.MatchValue) and named(node.value)
        if compared or matched or (asked and any(map(named, node.args))):
            yield ast.unparse(node)


def test_no_name_of_a_format_is_compared() -> None:
    assert {"delayed", "current", "float8", "block", "mxfp8", "nvfp4"} <= NAMES
    paths = [path for path in SOURCE.rglob("*.py") if not path.relative_to(SOURCE).as_posix().startswith(OWN)]
    assert len(paths) > 300
    assert [f"{path.relative_to(ROOT)}: {found}" for path in paths for found in comparisons(path.read_text())] == []


@pytest.mark.parametrize(
    "source",
    ["x == 'mxfp8'", "'block' in x", "x not in ('delayed', 'current')", "x.startswith('nvfp4')", "match x:\n    case 'float8':\n        pass"],
)
def test_each_way_to_compare_is_seen(source: str) -> None:
    assert len([*comparisons(source)]) == 1
