"""A signature of six or more parameters is written where the function is declared: a method that reads all of them takes the call, by name."""

from __future__ import annotations

import ast

from doc_pages import ROOT

from fusible.tex.interface.declare import DECLARATIONS

TEX = ROOT / "src" / "fusible" / "tex"


def methods(folder: str) -> dict[tuple[str, str], list[str]]:
    """The parameters of every method below a folder, by file and name."""
    found = {}
    for path in (TEX / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        taken = [*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs]
                        found[path.relative_to(TEX).as_posix(), method.name] = [x.arg for x in taken if x.arg != "self"]
    return found


def test_no_method_restates_a_long_signature() -> None:
    declared = {name: [*declaration.signature.parameters] for name, declaration in DECLARATIONS.items() if len(declaration.signature.parameters) >= 6}
    assert len(declared) > 40
    below = {**methods("backends"), **methods("calls"), **methods("formulas")}
    assert [where for where, parameters in below.items() if declared.get(where[1]) == parameters] == []


def test_no_declaration_restates_another() -> None:
    written: dict[tuple[str, ...], list[str]] = {}
    for (_, name), parameters in methods("interface").items():
        if len(parameters) >= 8 and name in DECLARATIONS:
            written.setdefault(tuple(parameters), []).append(name)
    assert [names for names in written.values() if len(names) > 1] == []
