"""Typed stubs, for editors and type checkers, which run nothing: of ``fusible.tex`` and ``fusible.tex.prim``, whose functions are made from
declarations, and of the modules that make functions and classes of the rows of ``tex.activations``.

``python -m fusible.tex.selection.stub`` (``make stub``) writes them; a test sees that they are current.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from enum import Enum
from inspect import Parameter, Signature
from pathlib import Path
from textwrap import fill, indent
from types import ModuleType
from typing import Any

from fusible.tex.interface.declare import DECLARATIONS, Declaration
from fusible.tex.interface.domains import NAMES

__all__ = ["stubs", "stubs_beside"]

_TEX = Path(__file__).parent.parent
_HEAD = '"""Written by `make stub` from the declarations of fusible.tex.interface; their documentation is there."""\n\n'
_NEEDED = (
    "from collections.abc import Sequence\nfrom typing import Any\nfrom fusible.tex.interface.arguments import *\n"
    f"from fusible.tex.interface.domains import {', '.join(NAMES)}\n"
    "from fusible.tex.enums import *\n"
)
_ITSELF = "from fusible import tex as tex"
_PREFIX = "prim_"
_BESIDE = "# ruff: noqa: E501, I001\n# Written by `make stub` of the module beside it, which makes names of the rows of fusible.tex.activations.\n"


def _imports(source: Path) -> list[str]:
    """The imports from this package, as a stub passes them on."""
    lines = []
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fusible."):
            names = ", ".join(alias.name if alias.name == "*" else f"{alias.name} as {alias.name}" for alias in node.names)
            lines.append(f"from {node.module} import {names}")
    return lines


def _annotation(annotation: Any) -> str:
    if annotation is Signature.empty:
        return "Any"
    return annotation if isinstance(annotation, str) else f"{annotation.__module__.split('.')[1]}.{annotation.__name__}"  # a class by its room


def _parameter(parameter: Parameter) -> str:
    star = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    annotation = "" if parameter.annotation is Parameter.empty else f": {_annotation(parameter.annotation)}"
    default = "" if parameter.default is Parameter.empty else f" = {_written(parameter.default)}"
    return f"{star}{parameter.name}{annotation}{default}"


def _written(default: object) -> str:
    return f"{type(default).__name__}.{default.name}" if isinstance(default, Enum) else repr(default)


def _definition(name: str, signature: Signature) -> str:
    parameters = list(signature.parameters.values())
    written = [_parameter(p) for p in parameters]
    keyword = next((i for i, p in enumerate(parameters) if p.kind is Parameter.KEYWORD_ONLY), None)
    if keyword is not None and not any(p.kind is Parameter.VAR_POSITIONAL for p in parameters):
        written.insert(keyword, "*")
    listed, result = ", ".join(written), _annotation(signature.return_annotation)
    if len(name) + len(listed) + len(result) > 130:
        listed = f"\n{fill(listed, 150, initial_indent='    ', subsequent_indent='    ')}\n"
    return f"def {name}({listed}) -> {result}:"


def _declared(declaration: Declaration) -> str:
    return f"{_definition(declaration.name.removeprefix(_PREFIX), declaration.signature)} ..."


def stubs() -> dict[Path, str]:
    """What each stub must say, by its path."""
    own = [declaration for name, declaration in sorted(DECLARATIONS.items()) if not name.startswith(_PREFIX)]
    primitives = [declaration for name, declaration in sorted(DECLARATIONS.items()) if name.startswith(_PREFIX)]
    head = f"# ruff: noqa: F401, F403, F405, E501, A002, I001\n{_HEAD}{_NEEDED}"
    return {
        _TEX / "__init__.pyi": "\n".join([head, *_imports(_TEX / "__init__.py"), _ITSELF, "", *map(_declared, own)]) + "\n",
        _TEX / "prim.pyi": "\n".join([head, *map(_declared, primitives)]) + "\n",
    }


class _WithoutBodies(ast.NodeTransformer):
    """What a module's source says of its functions and classes: no bodies, and of variables those with an annotation, without their values."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.body = node.body or [ast.Expr(ast.Constant(...))]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = node.body[:1] if ast.get_docstring(node) else [ast.Expr(ast.Constant(...))]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = None
        return node

    def visit_Assign(self, node: ast.Assign) -> None:
        return None


def _made(name: str, value: Any) -> str:
    """The definition of what a module made, with its documentation."""
    doc = indent(f'"""{inspect.getdoc(value)}"""', "    ")
    if not inspect.isclass(value):
        return f"{_definition(name, inspect.signature(value))}\n{doc}"
    lines, own = [f"class {name}({', '.join(base.__name__ for base in value.__bases__)}):", doc], vars(value).get("__init__")
    if own:  # what made the class keeps the options as attributes
        signature = inspect.signature(own)
        lines += [f"    {p.name}: {_annotation(p.annotation)}" for p in signature.parameters.values() if p.default is not p.empty]
        lines.append(indent(f"{_definition('__init__', signature)} ...", "    "))
    return "\n".join(lines)


def _beside(path: Path, module: ModuleType) -> str:
    """The stub of ``module`` at ``path``: what its source defines, what it made, and of its imports what these read, or ``__all__`` passes on."""
    tree = ast.parse(path.read_text())
    defined = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    imported = {alias.asname or alias.name: (node, alias.name) for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    shown = [node for name, node in defined.items() if isinstance(node, ast.ClassDef) or not name.startswith("_")]
    made = [name for name in module.__all__ if name not in defined and name not in imported]
    body = "\n\n".join([*(ast.unparse(_WithoutBodies().visit(node)) for node in shown), *(_made(name, getattr(module, name)) for name in made)])
    read = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    imports = [
        f"from {node.module} import {name}{f' as {own_name}' if own_name in module.__all__ or own_name != name else ''}"
        for own_name, (node, name) in imported.items()
        if own_name in module.__all__ or own_name in read
    ]
    return "\n".join([_BESIDE, *imports, "", body]) + "\n"


def stubs_beside(package: Path = _TEX.parent) -> dict[Path, str]:
    """What the stub must say of each module that has one of ``make stub`` beside it, by its path."""
    paths = [path.with_suffix("") for path in sorted(package.rglob("*.pyi")) if path.read_text().startswith(_BESIDE)]
    modules = {path: importlib.import_module(".".join(path.relative_to(package.parent).parts)) for path in paths}
    return {path.with_suffix(".pyi"): _beside(path.with_suffix(".py"), module) for path, module in modules.items()}


if __name__ == "__main__":
    for path, text in (stubs() | stubs_beside()).items():
        path.write_text(text)
