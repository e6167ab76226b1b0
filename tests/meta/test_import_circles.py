"""No circle of imports: each file of the package can be read, and imported, after those that it stands on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from doc_pages import ROOT

SOURCE = ROOT / "src"
SMALL = 3
"""The most files of a circle that types alone close: a class, and what it is taken apart into."""

HEAVY = {"iree", "jaxlib", "matplotlib", "torch"}
"""Packages that a function of ``fusible.lazy`` may import at first need, with a comment that says so."""


class Import(NamedTuple):
    """``when``: "run" as the file is imported, "type" for type checkers alone, "call" within a function; ``late`` behind a definition."""

    target: str
    when: str
    line: int
    late: bool


def imports(text: str, package: str, known: frozenset[str]) -> Iterator[Import]:
    """What a file of ``package`` imports. A name that is a file is imported from that, not from its package, which is under way already."""

    def found(node: ast.AST, when: str, late: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, when, node.lineno, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(file if (file := f"{base}.{alias.name}") in known else base, when, node.lineno, late)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for inner in node.body:
                yield from found(inner, "type", late)
            for inner in node.orelse:
                yield from found(inner, when, late)
        else:
            inside = "call" if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) else when
            for inner in ast.iter_child_nodes(node):
                yield from found(inner, inside, late)

    late = False
    for node in ast.parse(text).body:
        yield from found(node, "run", late)
        late = late or isinstance(node, ast.FunctionDef | ast.ClassDef)


def modules() -> dict[str, Path]:
    """Every file of the package by the name of its module."""
    return {".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCE.rglob("fusible/**/*.py")}


@pytest.fixture(scope="module")
def imported() -> dict[str, list[Import]]:
    """What every file imports."""
    files = modules()
    known = frozenset(files)
    packages = {name: name if path.name == "__init__.py" else name.rpartition(".")[0] for name, path in files.items()}
    return {name: list(imports(path.read_text(), packages[name], known)) for name, path in files.items()}


def graph(imported: Mapping[str, list[Import]], *when: str) -> dict[str, set[str]]:
    return {name: {i.target for i in found if i.when in when and i.target in imported} - {name} for name, found in imported.items()}


def circles(graph: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """The sets of nodes that all reach one another."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, stack = set[str](), [start]
        while stack:
            for node in graph[stack.pop()] - seen:
                seen.add(node)
                stack.append(node)
        reached[start] = seen
    return sorted({frozenset({b for b in reached[a] if a in reached[b]}) for a in graph if a in reached[a]}, key=sorted)


def test_no_files_import_one_another_in_a_circle(imported: dict[str, list[Import]]) -> None:
    """Nor dodges a circle by an import within a function: what is imported at first need is so for what it costs."""
    assert len(imported) > 500
    assert circles(graph(imported, "run", "call")) == []


def test_types_close_small_circles_alone(imported: dict[str, list[Import]]) -> None:
    assert [sorted(circle) for circle in circles(graph(imported, "run", "type")) if len(circle) > SMALL] == []


def test_lazy_dodges_no_circle(imported: dict[str, list[Import]]) -> None:
    """By an import within a function, or behind the definitions of a file. A heavy package may be imported at first need, with a comment."""
    files, dodging = modules(), []
    for name, found in imported.items():
        if not name.startswith("fusible.lazy"):
            continue
        text = files[name].read_text()
        explained = re.search(r"noqa: PLC0415 - \w", text) is not None
        dodging += [f"{name}:{i.line}" for i in found if i.when == "call" and not (i.target.split(".")[0] in HEAVY and explained)]
        dodging += [f"{name}:{i.line}" for i in found if i.when == "run" and i.late]
        dodging += [f"{name}: import_module of {of}" for of in re.findall(r"import_module\(\s*f?[\"'](fusible[\w.]*)", text)]
    assert not dodging


def test_each_kind_of_import_is_found() -> None:
    text = """
import a.b
from a import c, d
if TYPE_CHECKING:
    from .e import f
def g():
    from .. import h
class I:
    import k
"""
    found = imports(text, "p.q", frozenset({"a.c", "p.q.e", "p.h"}))
    assert [(i.target, i.when, i.late) for i in found] == [
        ("a.b", "run", False),
        ("a.c", "run", False),
        ("a", "run", False),
        ("p.q.e", "type", False),
        ("p.h", "call", False),
        ("k", "run", True),
    ]


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a", "f"}, "f": {"e"}}) == [frozenset("abc"), frozenset("ef")]
