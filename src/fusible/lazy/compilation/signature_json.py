"""The runtime inputs of an executable as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.lazy.compilation.input_info import Bounds, DimensionInputInfo, InputInfo, NamedDimension
from fusible.lazy.compilation.signature import Leaf, Parameter, Template
from fusible.lazy.dtypes import DTYPES

__all__ = ["parameters_from_json", "parameters_to_json"]


def parameters_to_json(parameters: Sequence[Parameter]) -> list[Any]:
    """The parameters as ``parameters_from_json`` reads them. Raises ``ArgumentError`` for a dict among the arguments with keys that JSON lacks."""
    return [[p.name, p.by_keyword, _template(p.template, p.name)] for p in parameters]


def _template(of: Template, name: str) -> Any:
    if isinstance(of, Leaf):
        if isinstance(of.info, DimensionInputInfo):
            return {"size": of.name, "bounds": list(of.info.span)}
        return {"tensor": of.name, "shape": [_dimension(d) for d in of.info.shape], "dtype": of.info.dtype.name, "donate": of.info.donate}
    if isinstance(of, dict):
        if not all(type(key) in (str, int) for key in of):
            raise ArgumentError(expected("texts or ints as keys", of=f"the argument {name} of an executable to save", got=list(of), do="rename them"))
        return {"dict": [[key, _template(part, name)] for key, part in of.items()]}
    if of is None:
        return None
    return {"tuple" if isinstance(of, tuple) else "list": [_template(part, name) for part in of]}


def _dimension(of: int | Bounds | NamedDimension) -> Any:
    if isinstance(of, int):
        return of
    return [of.min, of.opt, of.max, *([of.name] if isinstance(of, NamedDimension) else [])]


def parameters_from_json(data: Any) -> list[Parameter]:
    """The parameters; raises what reading a table of another form raises."""
    return [Parameter(_text(name), _read(template), bool(by_keyword)) for name, by_keyword, template in data]


def _read(data: Any) -> Template:
    if data is None:
        return None
    if "tensor" in data:
        shape = tuple([_read_dimension(d) for d in data["shape"]])
        return Leaf(_text(data["tensor"]), InputInfo(shape, DTYPES[data["dtype"]], bool(data["donate"])))
    if "size" in data:
        return Leaf(_text(data["size"]), DimensionInputInfo(Bounds(*data["bounds"])))
    if "dict" in data:
        return {key: _read(part) for key, part in data["dict"]}
    parts = [_read(part) for part in data["tuple" if "tuple" in data else "list"]]
    return tuple(parts) if "tuple" in data else parts


def _text(data: Any) -> str:
    if type(data) is not str:
        raise TypeError(f"a name is a text, not {data!r}")
    return data


def _read_dimension(data: Any) -> Any:
    return data if isinstance(data, int) else NamedDimension(_text(data[3]), *data[:3]) if len(data) == 4 else Bounds(*data)
