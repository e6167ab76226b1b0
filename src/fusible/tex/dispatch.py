"""The hot path: from a call to the chosen backend's method.

A dispatcher computes the kinds of the deciding arguments and looks the chosen method up by them: two dictionary look-ups, no lock, no environment
read, no probe. A choice is made on the first call of each kind and forgotten when the registry changes.
"""

from __future__ import annotations

import inspect
import linecache
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusible.locks import Lock
from fusible.tex.argument_kinds import kind_of
from fusible.tex.examination import blame, check_before, check_length, check_sorts
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS, Declaration, Request
from fusible.tex.interface.domains import Integers, Presence, domain_of
from fusible.tex.interface.layouts import layout_of_text
from fusible.tex.operands import KINDS, kind, sort
from fusible.tex.registry import Decision, registry
from fusible.tex.scope import current_scope, here
from fusible.tex.taping import Heard

__all__ = ["Call", "dispatcher", "explain", "hand_over", "inner", "record", "recording_whole"]


@dataclass(frozen=True)
class Call:
    """One call that went through tex while ``record`` was on."""

    request: Request
    backend: str

    @property
    def function(self) -> str:
        return self.request.function


class _Pending(threading.local):
    calls: list[Call] | None = None
    """What this thread called in a stretch that counts only as a whole."""


_pending = _Pending()
_recorders: list[list[Call]] = []
_recorders_lock = Lock()


def _kinds(declaration: Declaration, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The key of a call that names arguments or lacks some; a call that does not fit the signature raises ``TypeError``."""
    arguments = declaration.signature.bind(*args, **kwargs).arguments
    return tuple([kind(arguments[name]) for name in declaration.asks])


def _request(declaration: Declaration, key: tuple[Any, ...]) -> Request:
    return Request(declaration.name, tuple(zip(declaration.asks, key, strict=True)))


def _chosen(declaration: Declaration, key: tuple[Any, ...], arguments: dict[str, Any]) -> Callable[..., Any]:
    """The method that serves calls of these kinds and sorts, of which this is the first. Raises unless they are what the declaration says: there may
    be a backend that would compute something of others, such as dropout of integers, which gives integers."""
    request = _request(declaration, key[: len(declaration.asks)])
    backend = registry.choose(request)
    check_sorts(declaration, arguments)
    method = getattr(backend, request.function)
    if not _recorders:
        return method
    call = Call(request, backend.NAME)

    def recorded(*args: Any, **kwargs: Any) -> Any:
        if _pending.calls is not None:
            _pending.calls.append(call)
        else:
            for calls in _recorders:
                calls.append(call)
        return method(*args, **kwargs)

    return recorded


_PLAIN = ("bool", "int", "str", bool, int, str)
"""Annotations of arguments that are their own kind."""


def _kind_of(declaration: Declaration, ask: str) -> str:
    """The text that computes ``kind(ask)``: without a call for flags, None and tensors on a CPU, which is what most arguments are."""
    if declaration.signature.parameters[ask].annotation in _PLAIN:
        return ask
    return f"(None if {ask} is None else ('cpu', {ask}.dtype) if _type({ask}) is _tensor and {ask}.is_cpu else _kinds[_type({ask})]({ask}))"


def _sort_of(declaration: Declaration, p: inspect.Parameter) -> str:
    """The text that computes the sort of an argument: without a call where it is None or a tensor on a CPU. Of a list it is the class alone: the
    sorts of all that is in it would cost more than the rest of the call, and are left to who reads it."""
    name = p.name
    if not p.annotation.startswith(_TENSORS):
        return f"_type({name})" if p.annotation.startswith(_LISTS) or p.annotation in _VALUES else f"(None if {name} is None else _sort({name}))"
    # Of what is to be int32 the tests before have made sure.
    dtype = f"{name}.dtype" if name in declaration.where and not isinstance(domain_of(p.annotation)[0], Integers) else "True"
    return f"(None if {name} is None else {dtype} if _type({name}) is _tensor and {name}.is_cpu else _sort({name}))"


_VALUES = ("str", "Device", "Device | None", "DTypeLike")
"""Annotations of arguments that are no lists and hold no tensors."""
_LISTS = ("Sequence[", "list[", "Shape")
_TENSORS = ("Tensor", "torch.Tensor", "GivenTensor", "Lengths", "Indices")
"""What annotations of lists and of tensors begin with."""


def _beside(declaration: Declaration) -> list[inspect.Parameter]:
    """The parameters whose arguments do not decide who serves a call and are looked at all the same: those whose class or dtype is declared, and that
    the tests before do not wholly answer for."""
    found: list[inspect.Parameter] = []
    for p in declaration.signature.parameters.values():
        domain = domain_of(p.annotation)[0]
        told = isinstance(domain, Presence | Integers) or (domain is None and isinstance(p.annotation, str) and kind_of(p.annotation) is not None)
        if told and p.name not in declaration.asks and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            found.append(p)
    return found


def _key_of(declaration: Declaration) -> str:
    """The text of a call's key: the kinds of the arguments that decide, and the sorts of the others. Of what nobody serves none is looked at."""
    beside = [] if declaration.unserved else _beside(declaration)
    looks = [*(_kind_of(declaration, ask) for ask in declaration.asks), *(_sort_of(declaration, p) for p in beside)]
    return "".join(f"{look}, " for look in looks)


def _shape_test(declaration: Declaration, p: inspect.Parameter) -> str:
    """The text that refuses a vector whose length is declared as a number or by one of the numbers among the arguments: flags, and one entry for each
    member of a group. Whoever reads the first of too many would not notice. Index tensors are left to who reads them all."""
    text = declaration.where.get(p.name)
    layout = layout_of_text(text) if text else None
    if declaration.unserved or isinstance(domain_of(p.annotation)[0], Integers):
        return ""
    if layout is None or layout.count or layout.dims is None or len(layout.dims) != 1:
        return ""
    length = _LENGTH.fullmatch(layout.dims[0])
    if length is None or not (length[1].isdigit() or length[1] in declaration.signature.parameters):
        return ""
    fits = f"{p.name} is None or {p.name}.shape == ({length[1]}{length[2]},)"
    return f"            if not ({fits}):\n                _check_length({p.name!r}, {{{_seen(declaration)}}})\n"


_LENGTH = re.compile(r"(\w+)((?:\+\d+)?)")


def _seen(declaration: Declaration) -> str:
    """The text of all arguments by name."""
    return ", ".join(f"{p!r}: {p}" for p in declaration.signature.parameters)


def _test(function: str, parameter: inspect.Parameter, bind: Callable[[Any], str]) -> str:
    """The text that refuses an argument outside the domain that its parameter's annotation names; none where it names none."""
    domain, optional = domain_of(parameter.annotation)
    name = parameter.name
    if domain is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return ""
    belongs = f"{name} is None or " * optional + domain.fast(name, bind)
    return f"        if not ({belongs}):\n            {bind(domain.check)}({name}, {name!r}, {function!r})\n"


def _source(declaration: Declaration, name: str, bind: Callable[[Any], str], hears: bool) -> str:
    """The text of a function that makes ``declaration``'s dispatcher: its own parameters, so that Python itself binds, checks and defaults a call.

    What an argument may be is tested first (``interface.domains``), inline: a comparison costs 30 ns, a call of a check 300. What would cost too much
    is looked at once a call has failed (``fusible.tex.examination``): a ``try`` in which nothing is raised costs nothing.

    A general ``(*args, **kwargs)`` costs 0.2 to 0.7 us more per call: it packs, loops over the deciding arguments, and unpacks.
    """
    accepted: list[str] = []
    positional: list[str] = []
    named: list[str] = []
    for p in declaration.signature.parameters.values():
        default = "" if p.default is p.empty else "=None"  # the real one is set when the function is made
        if p.kind is p.VAR_KEYWORD:
            accepted.append(f"**{p.name}")
            named.append(f"**{p.name}")
        elif p.kind is p.KEYWORD_ONLY:
            accepted += ["*"] * (not any(text.startswith("*") for text in accepted)) + [f"{p.name}{default}"]
            named.append(f"{p.name}={p.name}")
        else:
            star = "*" * (p.kind is p.VAR_POSITIONAL)
            accepted.append(f"{star}{p.name}{default}")
            positional.append(f"{star}{p.name}")
    # What nobody serves says that first, whatever its arguments.
    tests = "" if declaration.unserved else "".join(_test(name, p, bind) for p in declaration.signature.parameters.values())
    arguments = ", ".join(positional + named)
    seen = _seen(declaration)
    lengths = "".join(_shape_test(declaration, p) for p in declaration.signature.parameters.values())
    rest = [p for p in declaration.before if domain_of(declaration.signature.parameters[p].annotation)[0] is None]
    before = f"_check({{{', '.join(f'{p!r}: {p}' for p in rest)}}})" if rest else "pass"
    heard = f"""
            if _here.note is not None:
                _result = _method({arguments})
                _here.note(_heard(_method, ({"".join(f"{value}, " for value in positional)}), dict({", ".join(named)}), _result))
                return _result"""
    return f"""
def _make(_kinds, _type, _tensor, _sort, _choose, _whats_here, _scope_here, _heard, _on_change, _blame, _check, _check_length):
    _common, _own = {{}}, {{}}
    def _drop():
        nonlocal _common, _own
        _common, _own = {{}}, {{}}
    _on_change(_drop)
    def _methods_here():
        _scope = _scope_here()
        return _common if _scope is None else _own.setdefault(_scope, {{}})
    def {name}({", ".join(accepted)}):
{tests}        try:
            {before}
{lengths}            _here = _whats_here()
            _methods, _key = _common if _here is None else _methods_here(), ({_key_of(declaration)})
            _method = _methods.get(_key)
            if _method is None:
                _method = _methods[_key] = _choose(_key, {{{seen}}})
            if _here is None:
                return _method({arguments}){heard if hears else ""}
            return _method({arguments})
        except Exception as _error:
            _blame(_error, {{{seen}}})
            raise
    return {name}
"""


def inner(function: str) -> Callable[..., Any]:
    """``tex.<function>`` for a backend's own use inside a call of it: dispatched alike, but who listens to the call does not hear it as another."""
    return dispatcher(DECLARATIONS[function], hears=False)


def dispatcher(declaration: Declaration, hears: bool = True) -> Callable[..., Any]:
    """The public function of ``declaration``; who listens hears its calls, unless it is for a backend's own use."""
    name = declaration.name.removeprefix("prim_")
    made: dict[str, Any] = {}

    def bind(value: Any) -> str:
        made[f"_{len(made)}"] = value
        return f"_{len(made) - 1}"

    source, file = _source(declaration, name, bind, hears), f"{__file__}: the dispatcher of {declaration.name}"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # so that a traceback shows the call
    exec(compile(source, file, "exec"), made)
    asked = partial(blame, declaration), partial(check_before, declaration), partial(check_length, declaration)
    choose = partial(_chosen, declaration)
    call = made["_make"](KINDS, type, torch.Tensor, sort, choose, here.get, current_scope, Heard, registry.on_change, *asked)
    parameters = declaration.signature.parameters.values()
    call.__defaults__ = tuple(p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty) or None
    call.__kwdefaults__ = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty} or None
    call.__qualname__ = name
    call.__doc__ = declaration.doc
    call.__signature__ = declaration.signature
    call.__module__ = "fusible.tex.prim" if declaration.name.startswith("prim_") else "fusible.tex"
    return call


def explain(function: str, *args: Any, **kwargs: Any) -> Decision:
    """Who would serve ``tex.<function>(*args, **kwargs)``, and for each other backend why not. Nothing is computed.

    ``print(explain("gelu", x, None))`` shows it as text; ``function`` may name a function of ``tex.prim`` as ``"prim.add"``.
    """
    name = function.replace("prim.", "prim_")
    if name not in DECLARATIONS:
        raise AttributeError(f"tex has no function {function!r}")
    declaration = DECLARATIONS[name]
    return registry.decide(_request(declaration, _kinds(declaration, args, kwargs)))


def hand_over(backend: TEXBackendBase, function: str, *args: Any, **kwargs: Any) -> Any:
    """Serve a call by the best backend that comes after ``backend``.

    For a backend's method that is refused by a value which no kind shows (a window, a probability). It must not have written anything. Raises
    ``NotServedError`` where nobody else serves the call.
    """
    declaration = DECLARATIONS[function]
    request = _request(declaration, _kinds(declaration, args, kwargs))
    return getattr(registry.choose_after(backend, request), function)(*args, **kwargs)


@contextmanager
def record() -> Iterator[list[Call]]:
    """Record every tex call made in this process while the context is open: ``with record() as calls: ...``."""
    calls: list[Call] = []
    with _recorders_lock:
        _recorders.append(calls)
    registry.changed()
    try:
        yield calls
    finally:
        with _recorders_lock:
            _recorders[:] = [other for other in _recorders if other is not calls]
        registry.changed()


@contextmanager
def recording_whole() -> Iterator[None]:
    """Let ``record`` see the calls of this thread within the context when it ends, and none of them where an error ends it."""
    former, _pending.calls = _pending.calls, []
    made = _pending.calls
    try:
        yield
    finally:
        _pending.calls = former
    for calls in _recorders if former is None else [former]:
        calls.extend(made)
