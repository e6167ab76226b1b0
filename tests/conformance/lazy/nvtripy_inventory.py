"""The public interface of a version of NVIDIA Tripy: names, signatures, defaults and dtypes, read from its sources without importing them.

    python tests/conformance/lazy/nvtripy_inventory.py DIRECTORY > tests/conformance/lazy/nvtripy-VERSION.json

``DIRECTORY`` is the package ``nvtripy``, unpacked from a wheel. What comes out holds facts alone: no text of the package's.
"""

from __future__ import annotations

import ast
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["DTYPES", "inventory"]

DTYPES = ("float32", "float16", "bfloat16", "float8", "int4", "int8", "int32", "int64", "bool")
_EXPORT = "public_api"
_METHOD = "register_tensor_method"
_MAKERS = ("_make_float_datatype", "_make_int_datatype", "_make_datatype")
_KINDS = {"posonlyargs": "positional", "args": "any", "kwonlyargs": "keyword"}


def inventory(package: Path) -> dict[str, Any]:
    """What the modules of ``package`` export, by the name under which a user finds it."""
    found: dict[str, Any] = {"version": "", "functions": {}, "classes": {}, "methods": {}, "values": [], "dtypes": {}}
    for path in sorted(package.rglob("*.py")):
        module = "" if path.name == "__init__.py" else f"{path.stem}."
        for node in ast.parse(path.read_text()).body:
            _read(node, module, found)
    found["values"].sort()
    return found


def _read(node: ast.stmt, module: str, found: dict[str, Any]) -> None:
    """Add what one statement of a module exports."""
    if isinstance(node, ast.FunctionDef):
        marks = [_called(mark) for mark in node.decorator_list]
        shown = {"parameters": _parameters(node.args)}
        for mark in node.decorator_list:
            if _called(mark) == _METHOD:
                found["methods"].setdefault(ast.literal_eval(mark.args[0]), []).append(shown)  # type: ignore[attr-defined]
            if _called(mark) == "interface":
                found["dtypes"].setdefault(node.name, []).append(_dtypes(mark))
        if _EXPORT in marks:
            found["functions"].setdefault(node.name, []).append(shown)
    elif isinstance(node, ast.ClassDef) and _EXPORT in map(_called, node.decorator_list):
        found["classes"][node.name] = _members(node)
        if "document_init_sig=False" in ast.unparse(node.decorator_list[0]):  # users construct none
            found["classes"][node.name]["methods"].pop("__init__", None)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        name = ast.unparse(targets[0])
        if name == "__version__":
            found["version"] = ast.literal_eval(node.value)  # type: ignore[arg-type]
        elif isinstance(node.value, ast.Call) and _called(node.value) in _MAKERS:
            found["values"].append(name)
        elif isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Call) and _called(node.value.func) == _EXPORT:
            found["values"].append(module + name if name != "logger" else name)


def _called(node: ast.expr) -> str:
    """The last part of the name of what a decorator or a call calls."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]


def _members(node: ast.ClassDef) -> dict[str, Any]:
    """The public methods, properties and attributes of a class, and its constructor."""
    methods: dict[str, Any] = {}
    properties: set[str] = set()
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and (not member.name.startswith("_") or member.name.endswith("__")):
            marks = [ast.unparse(mark) for mark in member.decorator_list]
            if "property" in marks or any(mark.endswith(".setter") for mark in marks):
                properties.add(member.name)
            else:
                methods[member.name] = _parameters(member.args)
            properties |= set(_assigned(member)) if member.name == "__init__" else set()
        elif isinstance(member, ast.AnnAssign):
            properties.add(ast.unparse(member.target))
    return {"bases": [ast.unparse(base) for base in node.bases], "methods": methods, "properties": sorted(properties)}


def _assigned(function: ast.FunctionDef) -> Iterator[str]:
    """The public attributes that a constructor sets."""
    for inner in ast.walk(function):
        for target in [inner.target] if isinstance(inner, ast.AnnAssign) else inner.targets if isinstance(inner, ast.Assign) else []:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self" and not target.attr.startswith("_"):
                yield target.attr


def _parameters(arguments: ast.arguments) -> list[list[str]]:
    """Name, kind and default of every parameter; no default where it has none."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    defaults |= {a: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None}
    rows = []
    for field, kind in _KINDS.items():
        if field == "kwonlyargs" and arguments.vararg:
            rows.append([arguments.vararg.arg, "*"])
        for argument in getattr(arguments, field):
            rows.append([argument.arg, kind, *([_default(defaults[argument])] if argument in defaults else [])])
    return rows + ([[arguments.kwarg.arg, "**"]] if arguments.kwarg else [])


def _default(node: ast.expr) -> str:
    """A default as text, a dtype by its name alone."""
    if isinstance(node, ast.Call):
        return f"{_called(node)}({', '.join(_default(a) for a in node.args)})"
    return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)


def _dtypes(mark: ast.expr) -> dict[str, Any]:
    """By parameter the dtypes that are taken, which parameters have one dtype, and which combinations are refused nevertheless."""
    assert isinstance(mark, ast.Call)
    required = [k.value for k in mark.keywords if k.arg == "input_requirements"]
    if not required:
        return {}
    names = sorted(set(_asked(required[0])))
    every = [dict(zip(names, given, strict=True)) for given in itertools.product(DTYPES, repeat=len(names))]
    accepted = [given for given in every if _holds(required[0], given)]
    taken = {name: [of for of in DTYPES if any(given[name] == of for given in accepted)] for name in names}
    pairs = [[a, b] for a, b in itertools.combinations(names, 2) if all(given[a] == given[b] for given in accepted)]
    likely = [given for given in every if all(given[n] in taken[n] for n in names) and all(given[a] == given[b] for a, b in pairs)]
    refused = [list(given.values()) for given in likely if given not in accepted]
    return {"taken": taken, **({"equal": pairs} if pairs else {}), **({"refused": refused} if refused else {})}


def _asked(node: ast.expr) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and _called(inner) == "GetInput":
            yield ast.literal_eval(inner.args[0])


def _holds(node: ast.expr, given: dict[str, str]) -> bool:
    """Whether a requirement holds for dtypes of the parameters, all of which are given."""
    if isinstance(node, ast.BinOp):
        both = _holds(node.left, given), _holds(node.right, given)
        return all(both) if isinstance(node.op, ast.BitAnd) else any(both)
    if isinstance(node, ast.UnaryOp):
        return not _holds(node.operand, given)
    if isinstance(node, ast.Compare):
        same = _value(node.left, given) == _value(node.comparators[0], given)
        return same is isinstance(node.ops[0], ast.Eq)
    assert isinstance(node, ast.Call), ast.unparse(node)
    if _called(node) == "If":
        met, *ways = node.args
        if _holds(met, given):
            return _holds(ways[0], given)
        return len(ways) == 1 or _holds(ways[1], given)
    assert _called(node) in ("OneOf", "NotOneOf"), ast.unparse(node)
    several = node.args[1]
    among = [_value(of, given) for of in several.elts] if isinstance(several, ast.List) else list(DTYPES)
    return (_value(node.args[0], given) in among) is (_called(node) == "OneOf")


def _value(node: ast.expr, given: dict[str, str]) -> str | None:
    """The dtype that an expression stands for: that of a parameter, or a constant."""
    if isinstance(node, ast.Constant):
        return node.value  # type: ignore[return-value] - None
    if isinstance(node, ast.Call):
        return given[ast.literal_eval(node.args[0])]
    assert isinstance(node, ast.Attribute), ast.unparse(node)
    return _value(node.value, given) if isinstance(node.value, ast.Call) else node.attr


def _written(found: dict[str, Any]) -> str:
    """JSON with one name a line."""
    parts = []
    for key, value in found.items():
        if isinstance(value, dict):
            rows = [f"  {json.dumps(name)}: {json.dumps(value[name])}" for name in sorted(value)]
            parts.append(f" {json.dumps(key)}: {{\n" + ",\n".join(rows) + "\n }")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}"


if __name__ == "__main__":
    print(_written(inventory(Path(sys.argv[1]))))
