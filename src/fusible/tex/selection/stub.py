"""The typed stubs of ``fusible.tex`` and ``fusible.tex.prim``, for editors: their functions are made from declarations, which no editor runs.

``python -m fusible.tex.selection.stub`` (``make stub``) writes them; a test sees that they are current.
"""

from __future__ import annotations

import ast
from enum import Enum
from inspect import Parameter, Signature
from pathlib import Path

from fusible.tex.interface.declare import DECLARATIONS, Declaration
from fusible.tex.interface.domains import NAMES

__all__ = ["stubs"]

_TEX = Path(__file__).parent.parent
_HEAD = '"""Written by `make stub` from the declarations of fusible.tex.interface; their documentation is there."""\n\n'
_NEEDED = (
    "from collections.abc import Sequence\nfrom typing import Any\nfrom fusible.tex.interface.arguments import *\n"
    f"from fusible.tex.interface.domains import {', '.join(NAMES)}\n"
    "from fusible.tex.enums import *\n"
)
_ITSELF = "from fusible import tex as tex"
_PREFIX = "prim_"


def _imports(source: Path) -> list[str]:
    """The imports from this package, as a stub passes them on."""
    lines = []
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fusible."):
            names = ", ".join(alias.name if alias.name == "*" else f"{alias.name} as {alias.name}" for alias in node.names)
            lines.append(f"from {node.module} import {names}")
    return lines


def _parameter(parameter: Parameter) -> str:
    star = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = "" if parameter.default is Parameter.empty else f" = {_written(parameter.default)}"
    return f"{star}{parameter.name}: {parameter.annotation}{default}"


def _written(default: object) -> str:
    return f"{type(default).__name__}.{default.name}" if isinstance(default, Enum) else repr(default)


def _definition(declaration: Declaration) -> str:
    parameters = list(declaration.signature.parameters.values())
    written = [_parameter(p) for p in parameters]
    keyword = next((i for i, p in enumerate(parameters) if p.kind is Parameter.KEYWORD_ONLY), None)
    if keyword is not None and not any(p.kind is Parameter.VAR_POSITIONAL for p in parameters):
        written.insert(keyword, "*")
    result = declaration.signature.return_annotation
    lines = "".join(f"\n    {text}," for text in written) + "\n" if written else ""
    return f"def {declaration.name.removeprefix(_PREFIX)}({lines}) -> {'Any' if result is Signature.empty else result}: ..."


def stubs() -> dict[Path, str]:
    """What each stub must say, by its path."""
    own = [declaration for name, declaration in sorted(DECLARATIONS.items()) if not name.startswith(_PREFIX)]
    primitives = [declaration for name, declaration in sorted(DECLARATIONS.items()) if name.startswith(_PREFIX)]
    head = f"# ruff: noqa: F401, F403, F405, E501, A002, I001\n{_HEAD}{_NEEDED}"
    return {
        _TEX / "__init__.pyi": "\n".join([head, *_imports(_TEX / "__init__.py"), _ITSELF, "", *map(_definition, own)]) + "\n",
        _TEX / "prim.pyi": "\n".join([head, *map(_definition, primitives)]) + "\n",
    }


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text)
