"""What NVIDIA's Python package reads of ``transformer_engine_torch``, found in its source: names, calls, members of enumerations, and what it binds
when it is imported."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fusible.tex.interface.declare import DECLARATIONS

__all__ = ["LACKING", "MODULE", "Use", "early", "members", "sources", "uses"]

MODULE = "transformer_engine_torch"
LACKING = {"LayerNorm"}
"""What the package reads and NVIDIA's own module has not either."""

APPLIER = "multi_tensor_applier"
"""``multi_tensor_applier(op, flag, lists, *rest)`` calls ``op(chunk_size, flag, lists, *rest)``."""


@dataclass(frozen=True)
class Use:
    """A call of ``name``, or a mention of it where ``call`` is None. ``skipped``: arguments before those of the call."""

    name: str
    where: str
    call: ast.Call | None = None
    skipped: int = 0

    @property
    def positional(self) -> int | None:
        """How many arguments are given by position; None where their number is not written."""
        given = self.call.args[self.skipped :] if self.call is not None else []
        return None if any(isinstance(argument, ast.Starred) for argument in given) else len(given) + self.skipped

    @property
    def keywords(self) -> list[str]:
        """The arguments that are given by name."""
        return [keyword.arg for keyword in self.call.keywords if keyword.arg is not None] if self.call is not None else []

    @property
    def complete(self) -> bool:
        """Whether all arguments are written: no ``*args``, no ``**kwargs``."""
        return self.call is not None and self.positional is not None and len(self.keywords) == len(self.call.keywords)


def sources() -> list[Path]:
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        pytest.skip("NVIDIA's Python package is not installed")
    root = Path(spec.origin).parent
    return [path for path in sorted(root.rglob("*.py")) if "jax" not in path.relative_to(root).parts]


def imported(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The names that stand for the module in a file, and those that it imports from the module."""
    aliases, names = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == MODULE}
        elif isinstance(node, ast.ImportFrom) and node.module == MODULE:
            names |= {alias.asname or alias.name for alias in node.names if alias.name != "*"}
    return aliases, names


def named(node: ast.AST, aliases: set[str], names: set[str]) -> str | None:
    """The name of the module's that ``node`` reads, or None."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        kept = node.value.id == "self" and node.attr.startswith("multi_tensor_") and node.attr in DECLARATIONS
        return node.attr if node.value.id in aliases or kept else None  # kept: an optimizer's own attribute that holds the function
    return node.id if isinstance(node, ast.Name) and node.id in names else None


def _trees() -> Iterator[tuple[Path, ast.Module, set[str], set[str]]]:
    for path in sources():
        tree = ast.parse(path.read_text())
        aliases, names = imported(tree)
        if aliases or names or APPLIER in path.read_text():
            yield path, tree, aliases, names


def uses() -> Iterator[Use]:
    for path, tree, aliases, names in _trees():
        for node in ast.walk(tree):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            name = named(node, aliases, names)
            if name is not None:
                yield Use(name, where)
            if isinstance(node, ast.Call):
                called = named(node.func, aliases, names)
                if called is not None:
                    yield Use(called, where, node)
                if isinstance(node.func, ast.Name) and node.func.id == APPLIER and node.args:
                    applied = named(node.args[0], aliases, names)
                    if applied is not None:
                        yield Use(applied, where, node, skipped=1)


def members() -> Iterator[tuple[str, str, str]]:
    """``(owner, member, where)`` of everything that is read of a name of the module's: of an enumeration, a class or a submodule."""
    for path, tree, aliases, names in _trees():
        for node in ast.walk(tree):
            owner = named(node.value, aliases, names) if isinstance(node, ast.Attribute) else None
            if owner is not None and isinstance(node, ast.Attribute) and not node.attr.startswith("_"):
                yield owner, node.attr, f"{path.name}:{node.lineno}"


def early() -> Iterator[tuple[str, str, str]]:
    """``(module, name, where)`` of every name of the module's that is read when a module of the package is imported: by an import from it (``where``
    is then the file alone), or in a table, a constant, a class's body, a default argument or a decorator."""
    for path, tree, aliases, names in _trees():
        package = path.parts[len(path.parts) - 1 - path.parts[::-1].index("transformer_engine") :]
        module = ".".join(package).removesuffix(".py").removesuffix(".__init__")
        for name in names:
            yield module, name, path.name
        for node in _run_at_import(tree):
            name = named(node, aliases, names)
            if name is not None:
                yield module, name, f"{path.name}:{getattr(node, 'lineno', 0)}"


def _run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are run when the module of ``node`` is imported: not the bodies of its functions."""
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        parts: list[ast.AST] = [*decorators, *node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
    else:
        parts = list(ast.iter_child_nodes(node))
    for part in parts:
        yield from _run_at_import(part)
