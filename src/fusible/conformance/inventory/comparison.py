"""Compares the served functions with an inventory: missing and extra names, calls that NVIDIA's function takes and ours does not, defaults, values.

A function that takes more than NVIDIA's takes every call of NVIDIA's, and is no difference: an optional parameter more, a default where NVIDIA's has
none, or arbitrary arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from inspect import Parameter as Kind
from types import ModuleType
from typing import Any

from fusible import tex
from fusible.conformance.inventory.reading import REQUIRED, Function, Inventory, NativeClass, Parameter, read_inventory, versions
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.selection.registry import registry

__all__ = ["DEFAULT", "Difference", "EXTRA", "MISSING", "SIGNATURE", "VALUE", "compare_backend", "compare_module", "compare_signature"]

MISSING, EXTRA, SIGNATURE, DEFAULT, VALUE = "missing", "extra", "signature", "default", "value"

_OWN = "of the interface to backends, which NVIDIA's module lacks"
_PRIMITIVE = "a primitive of Fusible's, which NVIDIA's module lacks"
_DECLARED = "declared beside NVIDIA's functions"
_BOTH_FORMS = "calls of Transformer Engine 2.20.0 are told from those of 2.20.2 by their number of arguments, and served alike"
_KNOWN = {("get_fused_attn_backend", "2.20.0"): _BOTH_FORMS, ("thd_out_correction", "2.20.0"): _BOTH_FORMS}
"""By function and version: why Fusible's declaration differs."""


@dataclass(frozen=True)
class Difference:
    """One difference from an inventory. ``kind`` is "missing", "extra", "signature", "default" or "value". ``why`` is its known reason; a difference
    without one is wrong."""

    name: str
    kind: str
    detail: str = ""
    why: str = ""

    @property
    def wrong(self) -> bool:
        """Whether no reason is known."""
        return not self.why


def compare_backend(backend: str, version: str | None = None) -> list[Difference]:
    """How a registered backend's functions differ from the inventory of a version (default: the newest), by name.

    Raises ``BackendError`` for an unknown backend, ``ArgumentError`` for an unknown version. The backend need not be able to run here.
    """
    inventory, found = read_inventory(version), registry.find(backend)
    rows: list[Difference] = []
    for name, function in inventory.functions.items():
        lacking = found.lacks(name) if name in DECLARATIONS else "tex has no such function"
        if lacking is not None:
            rows.append(Difference(name, MISSING, str(function), lacking))
        else:
            rows += _explained(compare_signature(function, _signature(getattr(found, name))), inventory.version)
    for name in DECLARATIONS.keys() - inventory.functions.keys():
        if found.lacks(name) is None:
            why = _PRIMITIVE if name.startswith("prim_") else _later(name, inventory.version) or _DECLARED
            rows.append(Difference(name, EXTRA, why=why))
    return sorted(rows, key=lambda row: (row.name, row.kind))


def compare_module(module: ModuleType, version: str | None = None) -> list[Difference]:
    """How a module that stands for ``transformer_engine_torch`` differs from the inventory of a version (default: the newest), by name.

    What it has beside NVIDIA's names has a reason where it is Fusible's. Raises ``ArgumentError`` for an unknown version.
    """
    inventory = read_inventory(version)
    rows = [*_functions(module, inventory), *_enumerations(module, inventory), *_classes(module, inventory)]
    for name, contained in inventory.submodules.items():
        submodule = getattr(module, name, None)
        missing = [name] if submodule is None else [f"{name}.{inner}" for inner in contained if not hasattr(submodule, inner)]
        rows += [Difference(each, MISSING) for each in missing]
    public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    rows += [Difference(name, EXTRA, why=_later(name, inventory.version) or _reason(name)) for name in set(public) - set(inventory.all)]
    rows += [Difference(name, MISSING, "not in __all__") for name in set(inventory.all) - set(public) if hasattr(module, name)]
    return sorted(rows, key=lambda row: (row.name, row.kind))


def _reason(name: str) -> str:
    return (_DECLARED if name in DECLARATIONS else _OWN) if name in vars(tex)["__all__"] else ""


def _functions(module: ModuleType, inventory: Inventory) -> Iterator[Difference]:
    for name, function in inventory.functions.items():
        served = getattr(module, name, None)
        if served is None:
            yield Difference(name, MISSING, str(function))
        else:
            differing = compare_signature(function, _signature(served))
            yield from _explained(differing, inventory.version) if name in DECLARATIONS else differing


def _explained(rows: Iterable[Difference], version: str) -> list[Difference]:
    return [replace(row, why=row.why or _KNOWN.get((row.name, version), "")) for row in rows]


def _later(name: str, version: str) -> str:
    """Why a name that a version lacks may be there: a later one has it."""
    for other in versions()[versions().index(version) + 1 :]:
        inventory = read_inventory(other)
        enumeration, _, member = name.partition(".")
        if name in inventory.all or member in inventory.enumerations.get(enumeration, {}):
            return f"there since {other}"
    return ""


def _enumerations(module: ModuleType, inventory: Inventory) -> Iterator[Difference]:
    for name, members in inventory.enumerations.items():
        served: Any = getattr(module, name, None)
        if served is None:
            yield Difference(name, MISSING)
            continue
        found = {member: int(value) for member, value in served.__members__.items()}
        for member in sorted(members.keys() | found.keys()):
            of, wanted, got = f"{name}.{member}", members.get(member), found.get(member)
            if got is None or wanted is None:
                yield Difference(of, MISSING) if got is None else Difference(of, EXTRA, why=_later(of, inventory.version))
            elif got != wanted:
                yield Difference(of, VALUE, f"{got}, and NVIDIA's is {wanted}")


def _classes(module: ModuleType, inventory: Inventory) -> Iterator[Difference]:
    for name, wanted in inventory.classes.items():
        served = getattr(module, name, None)
        if served is None:
            yield Difference(name, MISSING)
            continue
        yield from _constructors(wanted, served)
        bases = {base.__name__ for base in served.__mro__}
        yield from (Difference(name, SIGNATURE, f"no subclass of {base}") for base in wanted.bases if base not in bases)


def _constructors(wanted: NativeClass, served: type) -> Iterator[Difference]:
    signature = _signature(served)
    for parameters in wanted.constructors:
        yield from compare_signature(Function(wanted.name, parameters, wanted.name, by_keyword=True), signature)


def _signature(served: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(served)
    except (TypeError, ValueError):  # a function written in C may not say
        return None


def compare_signature(function: Function, served: inspect.Signature | None) -> list[Difference]:
    """How ``served`` (None: nobody can say) takes the calls of NVIDIA's ``function`` otherwise."""
    if served is None:
        return [Difference(function.name, SIGNATURE, "it does not say its parameters", "written in C, without a signature")]
    parameters = served.parameters
    kinds = {p.kind for p in parameters.values()}
    gathers, names = Kind.VAR_POSITIONAL in kinds, Kind.VAR_KEYWORD in kinds
    positional = [p.name for p in parameters.values() if p.kind in (Kind.POSITIONAL_ONLY, Kind.POSITIONAL_OR_KEYWORD)]
    wanted = [p.name for p in function.parameters if not p.keyword_only]
    rows: list[Difference] = []
    if positional[: len(wanted)] != wanted[: len(positional)] or (len(positional) < len(wanted) and not gathers):
        rows.append(Difference(function.name, SIGNATURE, f"takes ({', '.join(positional)}) by position, and NVIDIA's ({', '.join(wanted)})"))
    for parameter in function.parameters:
        found = parameters.get(parameter.name)
        rows += _parameter(function, parameter, found, gathered=names or (gathers and not parameter.keyword_only))
    known = {p.name for p in function.parameters}
    more = [p.name for p in parameters.values() if p.default is REQUIRED and p.name not in known and p.kind not in _GATHERING]
    rows += [Difference(function.name, SIGNATURE, f"asks for {name}, which NVIDIA's has not") for name in more if not rows]
    return rows


_GATHERING = (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD)


def _parameter(function: Function, wanted: Parameter, found: Kind | None, *, gathered: bool) -> Iterable[Difference]:
    if found is None or found.kind in _GATHERING:
        return [] if gathered else [Difference(function.name, SIGNATURE, f"has no {wanted.name}")]
    if (function.by_keyword and found.kind is Kind.POSITIONAL_ONLY) or (not wanted.keyword_only and found.kind is Kind.KEYWORD_ONLY):
        way = "position" if found.kind is Kind.POSITIONAL_ONLY else "name"
        return [Difference(function.name, SIGNATURE, f"takes {wanted.name} by {way} alone")]
    if wanted.required:
        return []
    if found.default is REQUIRED:
        return [Difference(function.name, DEFAULT, f"{wanted.name} has none, and NVIDIA's is {wanted.default!r}")]
    if not _same(found.default, wanted.default):
        return [Difference(function.name, DEFAULT, f"{wanted.name} is {found.default!r}, and NVIDIA's is {wanted.default!r}")]
    return []


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, Enum) and isinstance(wanted, str):
        return f"{type(found).__name__}.{found.name}" == wanted
    if isinstance(found, tuple) and isinstance(wanted, list):
        return list(found) == wanted
    return type(found) is type(wanted) and found == wanted
