"""Which line of the user's program recorded an operation, and how an error shows it."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import sys
import textwrap
from collections.abc import Mapping
from importlib.machinery import PathFinder
from types import CodeType, FrameType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

__all__ = ["Place", "Source", "SourceInfo", "UNKNOWN", "describe", "excerpt", "is_ours", "place_of", "source_infos", "user_frame", "user_line"]

Source = tuple[CodeType | None, int]
"""A place in a program: a code object and the offset of an instruction in it, which cost next to nothing to note."""


def _roots() -> tuple[str, ...]:
    """The directories whose code runs on behalf of the user: Fusible's, and torch's (whose modules call Fusible's) where it is installed."""
    torch = PathFinder.find_spec("torch")
    places = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    if torch is not None and torch.origin:
        places.append(os.path.dirname(torch.origin))
    return tuple(place + os.sep for place in places)


_ROOTS = _roots()
_NOTHING: Mapping[str, Any] = MappingProxyType({})
UNKNOWN: Source = (None, 0)


def is_ours(frame: FrameType) -> bool:
    """Whether a frame runs code of Fusible or torch, and none of the user's."""
    return frame.f_code.co_filename.startswith(_ROOTS)


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from ``frame`` outwards that is the user's."""
    while frame is not None and is_ours(frame):
        frame = frame.f_back
    return frame


def user_line() -> Source:
    """The place of the innermost caller that is the user's code. Costs a few hundred nanoseconds: lines are looked up when they are printed."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_ROOTS):
            return code, frame.f_lasti
        frame = frame.f_back
    return UNKNOWN


class Place(NamedTuple):
    """A range of columns of the user's program; ``column`` and ``end`` count from 0, and the range may end on a later line."""

    file: str
    line: int
    end_line: int
    column: int
    end: int
    function: str


@functools.lru_cache(maxsize=4096)
def place_of(source: Source) -> Place:
    """The lines and columns of a source: of the expression that its instruction belongs to."""
    code, offset = source
    if code is None:
        return Place("<unknown>", 0, 0, 0, 0, "")
    positions = list(code.co_positions())
    line, end_line, column, end = positions[offset // 2] if offset // 2 < len(positions) else (None, None, None, None)
    line = line or code.co_firstlineno
    return Place(code.co_filename, line, end_line or line, column or 0, end or 0, code.co_qualname)


class SourceInfo(NamedTuple):
    """A place of the user's program as ``Tensor.stack_info`` gives it; ``column_range`` is of the expression, counted from 0, on one line."""

    module: str | None
    file: str
    line: int
    function: str
    code: str
    column_range: tuple[int, int] | None


def source_infos(source: Source) -> list[SourceInfo]:
    """The place of a source, in a list; none of one that is not known."""
    code, _ = source
    if code is None:
        return []
    place = place_of(source)
    module = getattr(inspect.getmodule(code), "__name__", None)
    columns = (place.column, place.end) if place.end_line == place.line else None
    text = linecache.getline(place.file, place.line).rstrip("\n")
    return [SourceInfo(module, place.file, place.line, code.co_name, text, columns)]


def describe(source: Source) -> str:
    """``file:line`` of a source."""
    place = place_of(source)
    return f"{place.file}:{place.line}"


def excerpt(source: Source, argument: str | None = None, parameters: tuple[str, ...] = (), known: Mapping[str, Any] = _NOTHING) -> str:
    """The user's line with ``^^^`` under the expression, or under the argument of it that ``argument`` names.

    ``parameters`` are the parameters of the called function in order. ``known`` holds the values of the user's names: where a module stands
    before the dot of a call, its first argument is in the parentheses, else it is what stands before the dot.
    """
    place = place_of(source)
    text = linecache.getline(place.file, place.line).rstrip("\n")
    where = f"{place.file}:{place.line}" + (f", in {place.function}" if place.function not in ("", "<module>") else "")
    if not text.strip():
        return where
    found = _argument(place, argument, parameters, known) if argument is not None else None
    line, first, last = found or (place.line, place.column, place.end if place.end_line == place.line else len(text.encode()))
    text = linecache.getline(place.file, line).rstrip("\n")
    start, stop = (len(text.encode()[:column].decode(errors="replace")) for column in (first, last))
    stripped = text.lstrip()
    indent = len(text) - len(stripped)
    carets = " " * (4 + max(start - indent, 0)) + "^" * max(stop - max(start, indent), 1)
    return f"{where}\n    {stripped}\n{carets}"


def _argument(place: Place, argument: str, parameters: tuple[str, ...], known: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """The line, first and last column of an argument of the expression at ``place``; ``None`` where it cannot be told."""
    lines = [linecache.getline(place.file, n) for n in range(place.line, place.end_line + 1)]
    if not all(lines) or argument not in parameters:
        return None
    lines[-1] = lines[-1].encode()[: place.end].decode(errors="replace")
    lines[0] = lines[0].encode()[place.column :].decode(errors="replace")
    try:
        node = ast.parse("(" + textwrap.dedent("".join(lines)) + ")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    found = _operand(node, argument, parameters, known)
    if found is None or found.end_col_offset is None or found.end_lineno is None:
        return None
    on_first = found.lineno == 1
    line = place.line + found.lineno - 1
    shift = place.column - 1 if on_first else 0
    last = found.end_col_offset + shift if found.end_lineno == found.lineno else len(linecache.getline(place.file, line).rstrip("\n").encode())
    return line, found.col_offset + shift, last


def _root(node: ast.expr) -> str:
    """The name that a dotted expression begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _operand(node: ast.expr, argument: str, parameters: tuple[str, ...], known: Mapping[str, Any]) -> ast.expr | None:
    index = parameters.index(argument)
    if isinstance(node, ast.Call):
        named = next((keyword.value for keyword in node.keywords if keyword.arg == argument), None)
        if named is not None:
            return named
        operands: list[ast.expr] = list(node.args)
        if isinstance(node.func, ast.Attribute) and not isinstance(known.get(_root(node.func)), ModuleType):
            operands.insert(0, node.func.value)
        return operands[index] if index < len(operands) and not any(isinstance(a, ast.Starred) for a in operands[: index + 1]) else None
    parts: list[ast.expr]
    if isinstance(node, ast.BinOp | ast.Compare):
        right = node.right if isinstance(node, ast.BinOp) else node.comparators[0]
        parts, index = [node.left, right], {"lhs": 0, "rhs": 1}.get(argument, index)
    elif isinstance(node, ast.UnaryOp):
        parts = [node.operand]
    elif isinstance(node, ast.Subscript):
        parts = [node.value, node.slice]
    else:
        return None
    return parts[index] if index < len(parts) else None
