"""``fusible.facade``: what a package offers is what modules list in their ``__all__``; what it imports for itself has an underscore."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
from doc_pages import ROOT

PACKAGES = sorted(path for path in (ROOT / "src" / "fusible").rglob("__init__.py") if "_public_names(globals()" in path.read_text())


def unlisted(source: str) -> list[str]:
    """The names that a package's source offers beside those in the ``__all__`` of the module that it has each from."""
    tree, wrong = ast.parse(source), []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            ours = str(node.module).startswith("fusible.")
            module = importlib.import_module(str(node.module))
            listed = getattr(module, "__all__", vars(module)) if ours else ()  # one that makes its names of a table lists none
            offered = [(alias.name, alias.asname or alias.name) for alias in node.names if alias.name != "*"]
            wrong += [public for name, public in offered if not public.startswith("_") and name not in listed and public not in submodules(source)]
        elif isinstance(node, ast.Assign):
            wrong += [t.id for t in node.targets if isinstance(t, ast.Name) and not t.id.startswith("_")]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            wrong.append(node.name)
    return wrong


def submodules(source: str) -> set[str]:
    """Those that the package says it offers: ``_public_names(globals(), "types")``."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_public_names"]
    return {word.value for call in calls for word in call.args[1:] if isinstance(word, ast.Constant)}


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.parent.name)
def test_a_package_offers_what_modules_list(path: Path) -> None:
    assert unlisted(path.read_text()) == []


def test_what_a_package_would_offer_by_mistake_is_seen() -> None:
    source = "from typing import Any\nfrom fusible.nvte.tensor import Data as _Data\nfrom fusible.nvte.casting import cast, _GROUPED_ROWS as ROWS\n"
    assert unlisted(source + "COUNT = 1\n") == ["Any", "ROWS", "COUNT"]
    assert unlisted("from fusible.lazy import types\n__all__ = _public_names(globals(), 'types')\n") == []
    assert len(PACKAGES) > 12
