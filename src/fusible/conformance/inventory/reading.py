"""The inventories beside this file, read into records: ``transformer_engine_torch-VERSION.json``, one a version of Transformer Engine.

A file has everything (``all``, ``functions``, ``enumerations``, ``classes``, ``submodules``), or says which other version it ``changes``: then it has
what is otherwise there, and the names that it is ``without``. A default is a JSON value, or the text ``"Enumeration.MEMBER"``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import Parameter as Kind
from inspect import Signature
from pathlib import Path
from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.files import parse_json, read_file

__all__ = ["Function", "Inventory", "NativeClass", "Parameter", "REQUIRED", "read_inventory", "versions"]

REQUIRED: Any = Kind.empty
"""The default of a parameter that has none."""

_FOLDER = Path(__file__).parent
_NAME = "transformer_engine_torch-{}.json"


@dataclass(frozen=True)
class Parameter:
    """One parameter as NVIDIA's binding has it: ``type`` as its C++ says, None among them as ``| None``."""

    name: str
    type: str
    default: Any = REQUIRED
    keyword_only: bool = False

    @property
    def required(self) -> bool:
        """Whether a call must give it."""
        return self.default is REQUIRED

    def __str__(self) -> str:
        return self.name if self.required else f"{self.name}={self.default!r}"


@dataclass(frozen=True)
class Function:
    """One function. ``by_keyword``: the binding names its parameters; else NVIDIA takes them by position alone, and the names are those of its C++
    code. ``build``: the option that NVIDIA's module must be built with to have it."""

    name: str
    parameters: tuple[Parameter, ...]
    returns: str
    by_keyword: bool
    build: str | None = None

    @property
    def signature(self) -> Signature:
        """The parameters in NVIDIA's order, in which one that must be given may follow one that need not be."""
        kinds = [Kind.KEYWORD_ONLY if p.keyword_only else Kind.POSITIONAL_OR_KEYWORD for p in self.parameters]
        made = [Kind(p.name, kind, default=p.default, annotation=p.type) for p, kind in zip(self.parameters, kinds, strict=True)]
        return Signature(made, return_annotation=self.returns, __validate_parameters__=False)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.parameters))})"


@dataclass(frozen=True)
class NativeClass:
    """One class: the parameters of each of its constructors and methods, and its attributes that are read and written."""

    name: str
    bases: tuple[str, ...] = ()
    constructors: tuple[tuple[Parameter, ...], ...] = ()
    methods: Mapping[str, tuple[Parameter, ...]] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inventory:
    """What ``transformer_engine_torch`` has in one version. ``all``: what ``from transformer_engine_torch import *`` brings."""

    version: str
    all: tuple[str, ...]
    functions: Mapping[str, Function]
    enumerations: Mapping[str, Mapping[str, int]]
    classes: Mapping[str, NativeClass]
    submodules: Mapping[str, tuple[str, ...]]


def versions() -> list[str]:
    """The versions of Transformer Engine that there is an inventory of, oldest first."""
    before, after = _NAME.split("{}")
    found = [path.name.removeprefix(before).removesuffix(after) for path in _FOLDER.glob(_NAME.format("*"))]
    return sorted(found, key=lambda version: tuple(map(int, version.split("."))))


@functools.cache
def read_inventory(version: str | None = None) -> Inventory:
    """The inventory of a version (default: the newest). Raises ``ArgumentError`` for one that is not there."""
    known = versions()
    if version is not None and version not in known:
        raise ArgumentError(expected(" or ".join(known), of="the version of an inventory", got=repr(version), do="name one of these"))
    chosen = known[-1] if version is None else version
    return _inventory(_read(chosen))


def _read(version: str) -> dict[str, Any]:
    path = _FOLDER / _NAME.format(version)
    found: dict[str, Any] = parse_json(read_file(path), of=path.name, do="install Fusible again")
    if "changes" not in found:
        return found
    whole = _read(found["changes"])
    gone = set(found["without"])
    for part in ("functions", "enumerations", "classes", "submodules"):
        kept = {name: value for name, value in whole[part].items() if name not in gone}
        whole[part] = {**kept, **found.get(part, {})}
    whole["all"] = sorted((set(whole["all"]) - gone).union(found.get("functions", {}), found.get("enumerations", {}), found.get("classes", {})))
    return {**whole, "version": found["version"]}


def _inventory(read: dict[str, Any]) -> Inventory:
    return Inventory(
        version=read["version"],
        all=tuple(read["all"]),
        functions={name: _function(name, of) for name, of in read["functions"].items()},
        enumerations=read["enumerations"],
        classes={name: _class(name, of) for name, of in read["classes"].items()},
        submodules={name: tuple(names) for name, names in read["submodules"].items()},
    )


def _function(name: str, read: dict[str, Any]) -> Function:
    return Function(name, _parameters(read["parameters"]), read["returns"], read["by"] == "keyword", read.get("build"))


def _class(name: str, read: dict[str, Any]) -> NativeClass:
    methods = {method: _parameters(parameters) for method, parameters in read.get("methods", {}).items()}
    constructors = tuple(_parameters(parameters) for parameters in read.get("constructors", ()))
    return NativeClass(name, tuple(read.get("bases", ())), constructors, methods, tuple(read.get("attributes", ())))


def _parameters(read: list[dict[str, Any]]) -> tuple[Parameter, ...]:
    return tuple(Parameter(**parameter) for parameter in read)
