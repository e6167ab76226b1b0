"""Which arguments of a compiled function are runtime inputs, and how a call passes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusible.errors import ArgumentError, expected
from fusible.lazy.compilation.input_info import DimensionInputInfo, InputInfo, Runtime

__all__ = ["Leaf", "Parameter", "Signature", "Template", "bind", "filled", "mapped"]


@dataclass(frozen=True)
class Leaf:
    """One runtime input: ``name`` as errors spell it (``state['k'][0]``)."""

    name: str
    info: Runtime


Template = Leaf | dict[Any, Any] | list[Any] | tuple[Any, ...] | None
"""The runtime inputs in an argument, in its structure; ``None`` where a constant stands."""


@dataclass(frozen=True)
class Parameter:
    """An argument with runtime inputs. ``by_keyword``: it cannot be given by position."""

    name: str
    template: Template
    by_keyword: bool = False


def template_of(value: Any, name: str) -> Template:
    """The runtime inputs in ``value``, or ``None`` where there is none."""
    if isinstance(value, InputInfo | DimensionInputInfo):
        return Leaf(name, value)
    if isinstance(value, dict):
        found = {key: template_of(item, f"{name}[{key!r}]") for key, item in value.items()}
        return {key: item for key, item in found.items() if item is not None} or None
    if isinstance(value, list | tuple):
        items = [template_of(item, f"{name}[{i}]") for i, item in enumerate(value)]
        return None if all(item is None for item in items) else tuple(items) if isinstance(value, tuple) else items
    return None


def mapped(template: Template, function: Callable[[Leaf], Any]) -> Any:
    """The structure of ``template`` with ``function`` of each runtime input in its place."""
    if isinstance(template, Leaf):
        return function(template)
    if isinstance(template, dict):
        return {key: mapped(part, function) for key, part in template.items()}
    return None if template is None else type(template)(mapped(part, function) for part in template)


def leaves_of(template: Template) -> list[Leaf]:
    """The runtime inputs in order."""
    if isinstance(template, Leaf):
        return [template]
    items = template.values() if isinstance(template, dict) else template or ()
    return [leaf for item in items for leaf in leaves_of(item)]


def substitute(value: Any, template: Template, made: Mapping[str, Any]) -> Any:
    """``value`` with every runtime input replaced by what ``made`` holds under its name."""
    if template is None:
        return value
    if isinstance(template, Leaf):
        return made[template.name]
    if isinstance(value, dict):
        return {key: substitute(item, template.get(key), made) for key, item in value.items()}  # type: ignore[union-attr]
    items = [substitute(item, part, made) for item, part in zip(value, template, strict=True)]  # type: ignore[arg-type]
    if isinstance(value, list):
        return items
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def bind(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """The arguments that ``func`` is compiled on; raises ``ArgumentError`` where it does not take them."""
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        signature = inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        wanted = f"the arguments of {name}{signature}"
        raise ArgumentError(expected(wanted, of="compile", got=str(error), do="pass args and kwargs that fit")) from error


def filled(bound: inspect.BoundArguments, made: Mapping[str, Any]) -> inspect.BoundArguments:
    """``bound`` with every runtime input replaced by what ``made`` holds under its name."""
    new = inspect.BoundArguments(bound.signature, type(bound.arguments)())
    for parameter, value in bound.arguments.items():
        kind = bound.signature.parameters[parameter].kind
        items = {name: substitute(item, template_of(item, name), made) for name, item in _named(parameter, kind, value)}
        several = {inspect.Parameter.VAR_POSITIONAL: tuple(items.values()), inspect.Parameter.VAR_KEYWORD: items}
        new.arguments[parameter] = several[kind] if kind in several else items[parameter]
    return new


def _named(parameter: str, kind: Any, value: Any) -> list[tuple[str, Any]]:
    """The arguments that a parameter takes, by the names under which a call passes them."""
    if kind is inspect.Parameter.VAR_POSITIONAL:
        return [(f"{parameter}{i}", item) for i, item in enumerate(value)]
    return list(value.items()) if kind is inspect.Parameter.VAR_KEYWORD else [(parameter, value)]


class Signature:
    """The runtime inputs of a compiled function: its ``parameters`` that have any, and their ``leaves`` in order."""

    def __init__(self, function: str, parameters: Sequence[Parameter]) -> None:
        self.function = function
        self.parameters = list(parameters)
        self.leaves = [leaf for p in self.parameters for leaf in leaves_of(p.template)]
        self._positional = [p for p in self.parameters if not p.by_keyword]
        plain = all(isinstance(p.template, Leaf) and not p.by_keyword for p in self.parameters)
        self.plain_count = len(self.parameters) if plain else -1
        """The number of positional arguments where these are exactly the leaves; -1 for a signature where they never are."""

    @classmethod
    def of(cls, bound: inspect.BoundArguments, function: str) -> Signature:
        """The signature of a function compiled on ``bound``."""
        found: list[Parameter] = []
        for parameter, value in bound.arguments.items():
            kind = bound.signature.parameters[parameter].kind
            by_keyword = kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            found += [Parameter(name, template_of(item, name), by_keyword) for name, item in _named(parameter, kind, value)]
        return cls(function, [p for p in found if p.template is not None])

    def spelled(self, input: Any, result: Any) -> inspect.Signature:
        """The signature of a call, whose inputs, where they are no structures, are of the type ``input``."""
        kinds = {False: inspect.Parameter.POSITIONAL_OR_KEYWORD, True: inspect.Parameter.KEYWORD_ONLY}
        found = [
            inspect.Parameter(p.name, kinds[p.by_keyword], annotation=input if isinstance(p.template, Leaf) else type(p.template))
            for p in sorted(self.parameters, key=lambda p: p.by_keyword)
        ]
        return inspect.Signature(found, return_annotation=result)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The values that a call passes for the leaves. Raises ``ArgumentError`` for a missing, unknown or doubled argument, or another structure."""
        if len(args) > len(self._positional):
            wanted = f"{len(self._positional)} inputs{'' if len(self._positional) == len(self.parameters) else ' by position'}"
            raise ArgumentError(expected(wanted, of=self._of, got=len(args), do=f"pass {self._spelled}"))
        by_name = {p.name: value for p, value in zip(self._positional, args, strict=False)}
        for name, value in kwargs.items():
            if name in by_name:
                raise ArgumentError(expected(f"one value for {name}", of=self._of, got="two", do="pass it by position or by name"))
            if not any(p.name == name for p in self.parameters):
                do = "leave out what is a constant of the executable"
                raise ArgumentError(expected(self._spelled, of=self._of, got=f"an argument {name}", do=do))
            by_name[name] = value
        missing = [p.name for p in self.parameters if p.name not in by_name]
        if missing:
            got = f"{len(by_name)}, without {', '.join(missing)}"
            raise ArgumentError(expected(f"{len(self.parameters)} inputs", of=self._of, got=got, do=f"pass {self._spelled}"))
        flat: list[Any] = []
        for p in self.parameters:
            self._match(p.template, by_name[p.name], p.name, flat)
        return flat

    @property
    def _of(self) -> str:
        return f"the executable {self.function}"

    @property
    def _spelled(self) -> str:
        return f"({', '.join(p.name for p in self.parameters)})"

    def _match(self, template: Template, value: Any, name: str, into: list[Any]) -> None:
        """Append the runtime inputs of ``value``, which has the structure of ``template``. Values in place of constants are ignored."""
        if isinstance(template, Leaf):
            into.append(value)
        elif isinstance(template, dict):
            keys = list(value) if isinstance(value, dict) else None
            if keys is None or any(key not in value for key in template):
                got = f"the keys {keys}" if keys is not None else f"a {type(value).__name__}"
                wanted = f"a dict with the keys {list(template)}"
                raise ArgumentError(expected(wanted, of=f"{name} of {self._of}", got=got, do="pass the structure that it was compiled for"))
            for key, part in template.items():
                self._match(part, value[key], f"{name}[{key!r}]", into)
        elif template is not None:
            if not isinstance(value, list | tuple) or len(value) != len(template):
                got = f"{len(value)}" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
                wanted = f"a sequence of {len(template)}"
                raise ArgumentError(expected(wanted, of=f"{name} of {self._of}", got=got, do="pass the structure that it was compiled for"))
            for i, part in enumerate(template):
                self._match(part, value[i], f"{name}[{i}]", into)
