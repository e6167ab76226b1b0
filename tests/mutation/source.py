"""Wrong formulas: one change at a time in the source of what the reference runs for a function, which is then compared with float64 alone.

The changed code takes the place of the true one for every caller: a record whose expectation came from the reference itself would see nothing.
What only refuses bad calls is left as it is: samples are calls that are served.
"""

from __future__ import annotations

import ast
import copy
import gc
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from score import REFERENCE, kept

__all__ = ["Change", "Changer", "applied", "changes"]

_ROOMS = ("fusible/tex/backends/torch_backend/", "fusible/tex/formulas/")
_OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_NAMES = {
    "min": "max", "max": "min", "amin": "amax", "amax": "amin", "minimum": "maximum", "maximum": "minimum", "floor": "ceil", "ceil": "floor",
    "zeros": "ones", "zeros_like": "ones_like", "sin": "cos", "cos": "sin", "add_": "sub_", "mul_": "div_", "mul": "div", "sqrt": "rsqrt",
    "rsqrt": "sqrt", "any": "all", "all": "any",
}  # fmt: skip
_DROPPED = frozenset({"abs", "neg", "clone", "contiguous", "sum", "float", "exp", "log", "square", "t", "flip", "relu", "tanh"})


@dataclass(frozen=True)
class Change:
    """The change number ``place`` of a function's source; printed as where and what."""

    path: str
    name: str
    place: int
    what: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


class Changer(ast.NodeTransformer):
    """Counts the places where something can be changed, and changes the one asked for."""

    def __init__(self, wanted: int | None) -> None:
        self.wanted, self.count, self.found = wanted, 0, []

    def _here(self, node: ast.AST, what: str) -> bool:
        self.count += 1
        self.found.append(f"{ast.unparse(node)} -> {what}")
        return self.count - 1 == self.wanted

    def visit(self, node: Any) -> Any:
        if isinstance(node, ast.Raise | ast.arguments | ast.AnnAssign) or isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            return node
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return node
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and ast.unparse(node.value.func).split(".")[-1].startswith("check"):
            return node
        changed = self._changed(node)
        return self.generic_visit(node) if changed is None else changed

    def _changed(self, node: Any) -> Any:
        if isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and (other := _OPERATORS.get(type(node.op))):
            if self._here(node, other.__name__):
                node.op = other()
                return node
        if isinstance(node, ast.Compare) and (other := _OPERATORS.get(type(node.ops[0]))) and self._here(node, other.__name__):
            node.ops[0] = other()
            return node
        if isinstance(node, ast.If | ast.IfExp) and self._here(node.test, "not"):
            node.test = ast.UnaryOp(ast.Not(), node.test)
            return node
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            if self._here(node, str(value)):
                return ast.Constant(value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not) and self._here(node, "without"):
            return node.operand
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and self._here(node, "dropped"):
            return ast.Pass()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _NAMES and self._here(node, _NAMES[node.func.attr]):
                node.func.attr = _NAMES[node.func.attr]
                return node
            if node.func.attr in _DROPPED and not node.args and self._here(node, "dropped"):
                return node.func.value
        if isinstance(node, ast.Call) and len(node.args) > 1 and not any(isinstance(x, ast.Starred) for x in node.args[:2]):
            if self._here(node, "first two swapped"):
                node.args[:2] = node.args[1::-1]
                return node
        return None


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text())


def _definition(tree: ast.Module, name: str) -> Any:
    """The function of that qualified name."""
    node: Any = tree
    for part in name.replace(".<locals>", "").split("."):
        node = next((x for x in ast.walk(node) if isinstance(x, ast.FunctionDef | ast.ClassDef) and x.name == part), None)
    return node


def _run(function: str) -> set[tuple[str, str]]:
    """The files and names of the functions that the reference runs for the samples of a record."""
    found: set[tuple[str, str]] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and any(room in code.co_filename for room in _ROOMS) and "<" not in code.co_name:
            found.add((code.co_filename, code.co_qualname))

    samples = list(kept(function).samples(kept(function).dtypes[0]))
    sys.setprofile(note)
    try:
        for sample in samples:
            getattr(REFERENCE, function)(**sample.arguments)
    finally:
        sys.setprofile(None)
    return {
        pair for pair in found if not pair[0].endswith("operands.py") and "_outside_autograd" not in pair[1] and "check" not in pair[1].split(".")[-1]
    }


def changes(function: str, count: int) -> list[Change]:
    """A sample of the changes to what the reference runs for a function: the same ones while that source is the same."""
    every = []
    for path, name in sorted(_run(function)):
        definition = _definition(_tree(path), name)
        if definition is not None:
            changer = Changer(None)
            for statement in copy.deepcopy(definition).body:
                changer.visit(statement)
            every += [Change(path, name, place, what) for place, what in enumerate(changer.found)]
    return sorted(every, key=lambda change: hashlib.sha256(f"{function} {change} {change.place}".encode()).digest())[:count]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _codes(part)


@contextmanager
def applied(change: Change) -> Iterator[None]:
    """While it lasts, every function of that name has the changed code."""
    tree = copy.deepcopy(_tree(change.path))
    definition, changer = _definition(tree, change.name), Changer(change.place)
    definition.body = [changer.visit(statement) for statement in definition.body]
    made = compile(ast.fix_missing_locations(tree), change.path, "exec", dont_inherit=True, flags=annotations.compiler_flag)
    (code,) = [x for x in _codes(made) if x.co_qualname == change.name]
    live = [
        x for x in gc.get_objects()
        if type(x) is FunctionType and x.__code__.co_filename == change.path and x.__code__.co_qualname == change.name
    ]  # fmt: skip
    former = [x.__code__ for x in live]
    for x in live:
        x.__code__ = code
    try:
        yield
    finally:
        for x, old in zip(live, former, strict=True):
            x.__code__ = old
