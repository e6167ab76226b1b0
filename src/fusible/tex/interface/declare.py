"""Declaring a tex function: its signature and documentation once, and which of its arguments a backend may refuse by."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from types import FunctionType, SimpleNamespace
from typing import Any, TypeVar

from fusible.errors import NotServedError, check_callable

__all__ = [
    "CallArguments",
    "DECLARATIONS",
    "Declaration",
    "Request",
    "binds_by_name",
    "by_name",
    "function",
    "function_like",
    "handing_on",
    "inherited",
    "requires",
    "unserved_method",
]

F = TypeVar("F", bound=Callable[..., Any])

CallArguments = SimpleNamespace
"""The arguments of one call, by the parameters of the declared function (``by_name``)."""


@dataclass(frozen=True)
class Request:
    """What a backend is asked to serve: the function and the kinds of those arguments that decide.

    ``request["input"]`` is the kind of the argument ``input``: ``(device kind, dtype)`` for a tensor, the value itself for a flag.
    """

    function: str
    kinds: tuple[tuple[str, Hashable], ...]

    def __getitem__(self, argument: str) -> Hashable:
        return dict(self.kinds)[argument]

    @property
    def devices(self) -> frozenset[str]:
        """The device kinds that the arguments live on (``"lazy"`` for tensors that record)."""
        return frozenset(_devices(tuple(kind for _, kind in self.kinds)))

    def __str__(self) -> str:
        return f"{self.function}({', '.join(f'{name}={_show(kind)}' for name, kind in self.kinds)})"


def _devices(kind: Hashable) -> set[str]:
    if not isinstance(kind, tuple):
        return set()
    found = {kind[-2]} if len(kind) >= 2 and isinstance(kind[-2], str) else set()
    return found.union(*(_devices(part) for part in kind))


def _show(kind: Hashable) -> str:
    if isinstance(kind, tuple):
        return ":".join(_show(part) for part in kind)
    return str(kind).removeprefix("torch.")


@dataclass(frozen=True)
class Declaration:
    """One function of the interface. ``unserved``: what it needs that no backend of this package has, as a phrase after "it"; None where one has."""

    name: str
    signature: inspect.Signature = field(repr=False)
    asks: tuple[str, ...]
    doc: str = field(repr=False)
    unserved: str | None = None
    where: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of which dtype and shape an argument is, by its name (``interface.layouts``)."""
    before: tuple[str, ...] = ()
    """The arguments that are held against the declaration before each call, and not only once one fails: it would have written to others by then."""
    disjoint: tuple[str, ...] = ()
    """The arguments, or lists among them (``tensor_lists[1]``), whose tensors are written, no two in one place."""
    alone: tuple[str, ...] = ()
    """Those of ``disjoint`` that share no memory with what is read, either."""
    idle: frozenset[str] = frozenset()
    """The arguments that change no result: how much memory, how many processors. A backend's method may leave them out."""

    @property
    def positions(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.signature.parameters)}

    @property
    def of_method(self) -> inspect.Signature:
        """The signature of a backend's method that serves the function."""
        parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *self.signature.parameters.values()]
        return self.signature.replace(parameters=parameters)


DECLARATIONS: dict[str, Declaration] = {}
"""Every function of the interface by name, in the order of declaration."""


def unserved_method(declaration: Declaration) -> Callable[..., Any]:
    """What every backend has until it overrides it: a method that raises ``NotServedError`` with the backend's name and the function's.

    A declaration's body is its documentation: called as it stands, it would give None for a result.
    """
    name = declaration.name

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        which = f"the backend {self.NAME or type(self).__qualname__}{f', and {name} {declaration.unserved}' if declaration.unserved else ''}"
        do = f"call tex.{name.replace('prim_', 'prim.')}, which chooses a backend that has it"
        raise NotServedError(f"{name} not implemented by {which}: {do}")

    method.__name__, method.__qualname__, method.__doc__ = name, name, declaration.doc
    method.__signature__ = declaration.of_method  # type: ignore[attr-defined]
    return method


def function(
    *asks: str, unserved: str | None = None, before: str = "", disjoint: str = "", alone: str = "", idle: str = "", **where: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a method of an interface mixin as a tex function; ``asks`` names the arguments whose kinds a choice depends on, one or more in a text.

    The annotations say what each argument may be (``interface.arguments``), ``where`` of which dtype and shape (``interface.layouts``): a call that
    fails is held against them. ``before`` names the arguments that are so before every call (``"*"``: all of them). ``disjoint`` names those whose
    tensors are written and may not share memory with one another, ``alone`` those that may not with what is read, either
    (``tex.calls.memory_checks``). ``idle`` names those that change no result, which a backend's method may leave out.

    Every name in ``asks`` must be a parameter without a default. ``unserved`` says of a function that no backend of this package serves what it
    needs ("needs NVSHMEM"); a vendor's backend may serve it like any other.
    """

    def declare(method: Callable[..., Any]) -> Callable[..., Any]:
        _, *parameters = inspect.signature(method).parameters.values()
        signature = inspect.signature(method).replace(parameters=parameters)
        checked_before = tuple(signature.parameters) if before == "*" else tuple(before.split())
        memory = tuple(disjoint.split()), tuple(alone.split())
        doc = inspect.getdoc(method) or ""
        asked = tuple(" ".join(asks).split())
        return _entered(Declaration(method.__name__, signature, asked, doc, unserved, where, checked_before, *memory, frozenset(idle.split())))

    return declare


def function_like(
    other: Callable[..., Any], *asks: str, renamed: Mapping[str, str] | None = None, before: str = "", disjoint: str = "", **where: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a method as a tex function that takes what the declared ``other`` takes, but for the method's own parameters: these replace parameters
    of the same name, or follow the others.

    All that ``other`` says of its arguments holds for this one; ``asks``, ``before`` and ``where`` say more, and ``disjoint``, where given, replaces.
    ``renamed``: new names for parameters of ``other``, by the old ones.
    """
    declared = DECLARATIONS[other.__name__]

    def here(parameter: str) -> str:
        return parameter if renamed is None else renamed.get(parameter, parameter)

    def declare(method: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(method)
        shared = {here(p.name): p.replace(name=here(p.name)) for p in declared.signature.parameters.values()}
        _, *own = signature.parameters.values()
        return _entered(
            replace(
                declared,
                name=method.__name__,
                signature=signature.replace(parameters=[*(shared | {p.name: p for p in own}).values()]),
                doc=inspect.getdoc(method) or "",
                asks=(*map(here, declared.asks), *" ".join(asks).split()),
                where={here(parameter): layout for parameter, layout in declared.where.items()} | where,
                before=(*map(here, declared.before), *before.split()),
                disjoint=tuple(disjoint.split()) or declared.disjoint,
            )
        )

    return declare


def _entered(declaration: Declaration) -> Callable[..., Any]:
    """The method of a declaration, which is entered into ``DECLARATIONS``."""
    described = {
        "asks by": declaration.asks,
        "describes": (*declaration.where, *declaration.before),
        "keeps disjoint": (path.partition("[")[0] for path in (*declaration.disjoint, *declaration.alone)),
        "has idle": declaration.idle,
    }
    for does, arguments in described.items():
        unknown = [argument for argument in arguments if argument not in declaration.signature.parameters]
        assert not unknown, f"{declaration.name} {does} {unknown}, which are no parameters of it"
    DECLARATIONS[declaration.name] = declaration
    return unserved_method(declaration)


def requires(supports: Callable[[Request], str | None]) -> Callable[[F], F]:
    """Attach to a backend's method its answer to a request: the reason for refusing it, or None."""

    check_callable(supports, "supports of requires")

    def attach(method: F) -> F:
        check_callable(method, "what requires decorates")
        method.__supports__ = supports  # type: ignore[attr-defined]
        return method

    return attach


def inherited(method: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a base class's method, for ``requires`` to attach to what holds of one class alone."""
    assert isinstance(method, FunctionType)
    copy = FunctionType(method.__code__, method.__globals__, method.__name__, method.__defaults__, method.__closure__)
    copy.__kwdefaults__ = method.__kwdefaults__
    copy.__dict__.update(vars(method))
    return copy


def by_name(method: Callable[[Any, CallArguments], Any]) -> Callable[..., Any]:
    """Hand a backend's method the arguments of the declared function of its name as one object: ``def f(self, call): ... call.parameter ...``.

    Defaults are filled in. Raises ``TypeError`` for a call that does not fit the declaration.
    """
    declaration = DECLARATIONS[method.__name__]
    parameters = declaration.signature.parameters
    gathering = [p.name for p in parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    assert not gathering, f"{declaration.name} has {gathering}, which no single name stands for"
    return _adapted(declaration, method, f"method(self, call({', '.join(f'{name}={name}' for name in parameters)}))")


def handing_on(name: str, call: str) -> Callable[..., Any]:
    """A backend's method of the declared function ``name`` that returns the expression ``call``, of ``self`` and the function's parameters: it costs
    what the same method costs that is written out."""
    return _adapted(DECLARATIONS[name], unserved_method(DECLARATIONS[name]), call)


def binds_by_name(declaration: Declaration, method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` as one with the parameters of ``declaration``, of which it leaves out some that are idle. Itself where it leaves out none or others,
    which registration refuses."""
    try:
        taken = [*inspect.signature(method).parameters.values()][1:]
    except (TypeError, ValueError):  # a function written in C may not say
        return method
    names = [p.name for p in taken]
    left_out = declaration.signature.parameters.keys() - {*names}
    if not left_out or not left_out <= declaration.idle or {*names} != declaration.signature.parameters.keys() - left_out:
        return method
    # By position where that is possible: a name costs as much as a tenth of a small product.
    passed = [p.name if p.kind is p.POSITIONAL_OR_KEYWORD else f"{p.name}={p.name}" for p in taken]
    return _adapted(declaration, method, f"method(self, {', '.join(passed)})")


def _adapted(declaration: Declaration, method: Callable[..., Any], call: str) -> Callable[..., Any]:
    """A function with the parameters of ``declaration`` that returns the expression ``call`` of them: compiled, for it stands before each call of a
    kernel."""
    parts, defaults, named_alone = ["self"], {}, False
    for name, p in declaration.signature.parameters.items():
        if p.kind is p.KEYWORD_ONLY and not named_alone:
            parts, named_alone = [*parts, "*"], True
        if p.default is not p.empty:
            defaults[name] = p.default
        parts.append(name if p.default is p.empty else f"{name}=defaults[{name!r}]")
    # Compiled as of this file: a traceback, or the search for a user's own line, takes it for what it is.
    code = compile(f"lambda {', '.join(parts)}: {call}", __file__, "eval")
    adapted: Any = eval(code, {"method": method, "defaults": defaults, "call": CallArguments})
    functools.update_wrapper(adapted, method)
    del adapted.__wrapped__  # or its signature would be the method's
    adapted.__code__ = adapted.__code__.replace(co_name=declaration.name, co_qualname=declaration.name)  # which errors and tracebacks name
    adapted.__signature__ = declaration.of_method
    return adapted
