"""Which modules ``convert`` is to look at, and which linear layers stay in high precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.models.convert.linear import is_conv1d

__all__ = ["Filter", "HIGH_PRECISION", "Selection", "is_like_linear", "kept_in_high_precision"]

Filter = str | Callable[[str, nn.Module], bool]
"""A name, which may have the wildcards of a shell, or a function of a module's name and the module."""

HIGH_PRECISION = ("first", "last", "router", "head")
"""The layers that 8-bit recipes usually leave alone."""

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate", "gate_network", "wg"})


def is_like_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, of whatever class."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


@dataclass(frozen=True)
class Selection:
    """``include`` and ``exclude`` of a conversion, each checked filters, or for ``include`` None."""

    include: tuple[Filter, ...] | None
    exclude: tuple[Filter, ...]

    @classmethod
    def of(cls, include: Any, exclude: Any) -> Selection:
        return cls(None if include is None else filters_of(include, "include"), filters_of(exclude, "exclude"))

    def why_not(self, name: str, module: nn.Module) -> str:
        """Why a module is not looked at; empty where it is."""
        if self.include is not None and not any(matches(one, name, module) for one in self.include):
            return "not included"
        return "excluded" if any(matches(one, name, module) for one in self.exclude) else ""

    def check(self, model: nn.Module) -> None:
        """Raise ``ArgumentError`` for a name that no module has: a slip of the pen would otherwise go unseen."""
        check_names([("include", one) for one in self.include or ()] + [("exclude", one) for one in self.exclude], model)


def filters_of(filters: Any, argument: str) -> tuple[Filter, ...]:
    """Filters, of one or of several; none where they are None. Raises ``DTypeError``."""
    if filters is None:
        return ()
    several: tuple[Any, ...] = tuple(filters) if isinstance(filters, Iterable) and not isinstance(filters, str) else (filters,)
    wrong = ["None" if one is None else f"a {type(one).__name__}" for one in several if not isinstance(one, str) and not callable(one)]
    if wrong:
        do = "give names of modules, as 'mlp' or 'model.layers.0.*'"
        raise DTypeError(expected("names, or functions (name, module) -> bool", of=f"{argument} of convert", got=wrong[0], do=do))
    return several


def check_names(named: Iterable[tuple[str, Filter]], model: nn.Module) -> None:
    names = [name for name, _ in model.named_modules()]
    for argument, one in named:
        if isinstance(one, str) and not any(matches_name(one, name) for name in names):
            raise ArgumentError(expected("a name of modules", of=f"{argument} of convert", got=repr(one), do="look at model.named_modules()"))


def matches(one: Filter, name: str, module: nn.Module) -> bool:
    """Whether a filter takes a module."""
    return matches_name(one, name) if isinstance(one, str) else bool(one(name, module))


def matches_name(pattern: str, name: str) -> bool:
    """Whether the module of a name, or one around it, is called so: by the whole name or its last parts."""
    parts = name.split(".")
    tails = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return any(fnmatchcase(one, pattern) or fnmatchcase(one, f"*.{pattern}") for one in tails)


def kept_in_high_precision(model: nn.Module, keep: Sequence[Filter]) -> dict[str, str]:
    """By the name of a linear layer that stays as it is, why. ``keep``: words of ``HIGH_PRECISION``, and filters."""
    linears = {name: module for name, module in model.named_modules() if is_like_linear(module)}
    found: dict[str, str] = {}
    if "first" in keep or "last" in keep:
        first, last = _ends(model, list(linears))
        found |= {name: "it comes before the repeated blocks" for name in first if "first" in keep}
        found |= {name: "it comes behind the repeated blocks" for name in last if "last" in keep}
    if "router" in keep:
        found |= {name: "it routes" for name, module in linears.items() if _routes(name, module)}
    if "head" in keep:
        found |= dict.fromkeys(_heads(model, linears), "it is the head")
    own = [one for one in keep if one not in HIGH_PRECISION]
    return found | {name: "asked for" for name, module in linears.items() if any(matches(one, name, module) for one in own)}


def _ends(model: nn.Module, linears: list[str]) -> tuple[list[str], list[str]]:
    """The linear layers before the first and behind the last of the repeated blocks; of a model without, the first one and the last one."""
    blocks = [f"{name}." if name else "" for name, module in model.named_modules() if _is_repeated(module)]
    inside = [place for place, name in enumerate(linears) if any(name.startswith(block) for block in blocks)]
    if inside:
        return linears[: inside[0]], linears[inside[-1] + 1 :]
    return (linears[:1], linears[-1:]) if len(linears) > 2 else ([], [])


def _is_repeated(module: nn.Module) -> bool:
    """Whether a module is a list of blocks that are alike, with linear layers in them."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or not len(module):
        return False
    return len({type(child) for child in module}) == 1 and not is_like_linear(module[0]) and any(is_like_linear(inner) for inner in module.modules())


def _routes(name: str, module: nn.Module) -> bool:
    parts, rows, columns = name.split("."), getattr(module, "out_features", 0), getattr(module, "in_features", 0)
    return "router" in parts or rows == 1 or (parts[-1] in _ROUTERS and 2 * rows <= columns)


def _heads(model: nn.Module, linears: dict[str, nn.Module]) -> list[str]:
    """The layers that give the output of a language model: as it says so itself, or as they share a table of embeddings."""
    said = model.get_output_embeddings() if callable(getattr(model, "get_output_embeddings", None)) else None  # type: ignore[operator]
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [name for name, module in linears.items() if module is said or id(module._parameters.get("weight")) in tables]
