"""The typed stubs are those that tex's declarations, and the modules that make names of a table, give."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import fusible
from fusible import tex
from fusible.tex import prim
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.selection.stub import stubs, stubs_beside

PACKAGE = Path(fusible.__file__).parent


def test_the_stubs_are_current() -> None:
    assert len(stubs_beside()) == 5
    for path, text in (stubs() | stubs_beside()).items():
        assert path.read_text() == text, f"{path} is out of date: make stub"


def test_the_stubs_define_every_function_with_its_parameters() -> None:
    defined = {}
    for path, text in stubs().items():
        prefix = "prim_" if path.name == "prim.pyi" else ""
        defined |= {prefix + node.name: node.args for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert defined.keys() == DECLARATIONS.keys()
    for name, args in defined.items():
        written = [arg.arg for arg in (*args.args, *filter(None, [args.vararg]), *args.kwonlyargs, *filter(None, [args.kwarg]))]
        assert written == list(DECLARATIONS[name].signature.parameters), name


def test_whatever_tex_exports_is_in_the_stubs() -> None:
    texts = {path.name: text for path, text in stubs().items()}
    stars = {*tex.enums.__all__, *tex.classes.__all__}
    text = texts["__init__.pyi"]
    assert not [name for name in tex.__all__ if name not in stars and f"def {name}(" not in text and f" as {name}" not in text]
    assert all(f"def {name}(" in texts["prim.pyi"] for name in prim.__all__)


def test_the_stub_beside_a_module_has_all_that_it_exports() -> None:
    for path, text in stubs_beside().items():
        module = importlib.import_module(".".join(path.with_suffix("").relative_to(PACKAGE.parent).parts))
        names = {node.name for node in ast.parse(text).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        names |= {alias.asname for node in ast.parse(text).body if isinstance(node, ast.ImportFrom) for alias in node.names if alias.asname}
        assert names >= {*module.__all__}, path
