"""The hot path: from a call to the chosen backend's method.

A dispatcher makes a key of its arguments (``fusible.tex.selection.call_keys``) and finds the chosen method by it: one look-up, no lock, no
environment read, no probe. A choice is made on the first call of each key, which is also held against the declaration then, and forgotten when the
registry changes.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fusible.errors import MissingNameError, expected
from fusible.locks import Lock
from fusible.tex.calls.call_text import CallText, compiled, set_defaults
from fusible.tex.calls.examination import blame, check_before, check_length, check_sorts
from fusible.tex.calls.results import checked_method
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS, Declaration, Request
from fusible.tex.interface.domains import Integers, Number, domain_of
from fusible.tex.interface.layouts import layout_of_text
from fusible.tex.operands import kind
from fusible.tex.selection.backend_checks import nearest
from fusible.tex.selection.call_keys import arguments_of, check_integers, check_layouts, key_maker, kinds_in
from fusible.tex.selection.registry import Decision, registry
from fusible.tex.selection.scope import current_scope, here
from fusible.tex.selection.taping import RecordedCall

__all__ = ["Call", "dispatcher", "explain", "hand_over", "inner", "method_after", "record", "recording_whole", "successor"]


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


def _chosen(declaration: Declaration, after: TEXBackendBase | None, key: tuple[Any, ...], arguments: dict[str, Any]) -> Callable[..., Any]:
    """The method that serves calls of these kinds and sorts, of which this is the first; of a backend that comes ``after`` one, where that is given.
    Raises unless they are what the declaration says: there may be a backend that would compute something of others, such as dropout of integers,
    which gives integers."""
    check_layouts(declaration, arguments)
    if not declaration.unserved:
        check_integers(declaration, arguments)
    request = _request(declaration, kinds_in(declaration, key))
    backend = registry.choose(request) if after is None else registry.choose_after(after, request)
    check_sorts(declaration, arguments)
    method = checked_method(backend, declaration)
    if not _recorders or after is not None:
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
    return f"            if not ({fits}):\n                _check_length({p.name!r}, {{{CallText.of(declaration.signature).by_name}}})\n"


_LENGTH = re.compile(r"(\w+)((?:\+\d+)?)")


def _test(function: str, parameter: inspect.Parameter, bind: Callable[[Any], str]) -> str:
    """The text that refuses an argument outside the domain that its parameter's annotation names; none where it names none."""
    domain, optional = domain_of(parameter.annotation)
    name = parameter.name
    if domain is None or isinstance(domain, Integers) or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return ""
    # Of what most calls leave as it is, one look is enough.
    default = f"{name} is {bind(parameter.default)} or " if isinstance(domain, Number) and type(parameter.default) is domain.kind else ""
    belongs = f"{name} is None or " * optional + default + domain.fast(name, bind)
    return f"        if not ({belongs}):\n            {bind(domain.check)}({name}, {name!r}, {function!r})\n"


def _source(declaration: Declaration, name: str, bind: Callable[[Any], str], recorded: bool) -> str:
    """The text of a function that makes ``declaration``'s dispatcher: its own parameters, so that Python itself binds, checks and defaults a call.

    What an argument may be is tested first (``interface.domains``), inline: a comparison costs 30 ns, a call of a check 300. What would cost too much
    is looked at once a call has failed (``fusible.tex.calls.examination``): a ``try`` in which nothing is raised costs nothing.
    """
    call = CallText.of(declaration.signature)
    # What nobody serves says that first, whatever its arguments.
    tests = "" if declaration.unserved else "".join(_test(name, p, bind) for p in declaration.signature.parameters.values())
    lengths = "".join(_shape_test(declaration, p) for p in declaration.signature.parameters.values())
    rest = [p for p in declaration.before if domain_of(declaration.signature.parameters[p].annotation)[0] is None]
    before = f"_check({{{', '.join(f'{p!r}: {p}' for p in rest)}}})" if rest else "pass"
    recording = f"""
            if _here.note is not None:
                _result = _method({call.arguments})
                _here.note(_recorded_call(_method, ({"".join(f"{value}, " for value in call.positional)}), dict({", ".join(call.named)}), _result))
                return _result"""
    return f"""
def _make(_find_key_maker, _choose, _whats_here, _scope_here, _recorded_call, _on_change, _blame, _check, _check_length):
    _common, _own = {{}}, {{}}
    def _drop():
        nonlocal _common, _own
        _common, _own = {{}}, {{}}
    _on_change(_drop)
    def _key_of(*_in_key):
        nonlocal _key_of
        _key_of = _find_key_maker()
        return _key_of(*_in_key)
    def _methods_here():
        _scope = _scope_here()
        return _common if _scope is None else _own.setdefault(_scope, {{}})
    def {name}({call.parameters}):
{tests}        try:
            {before}
{lengths}            _here = _whats_here()
            _methods, _key = _common if _here is None else _methods_here(), _key_of({", ".join(arguments_of(declaration))})
            _method = _methods.get(_key)
            if _method is None:
                _method = _methods[_key] = _choose(_key, {{{call.by_name}}})
            if _here is None:
                return _method({call.arguments}){recording if recorded else ""}
            return _method({call.arguments})
        except Exception as _error:
            _blame(_error, {{{call.by_name}}})
            raise
    return {name}
"""


def inner(function: str) -> Callable[..., Any]:
    """``tex.<function>`` for a backend to call inside another call. It dispatches like the public function; recorders of tex calls do not see it."""
    return dispatcher(DECLARATIONS[function], recorded=False)


def successor(function: str, backend: TEXBackendBase) -> Callable[..., Any]:
    """``tex.<function>`` by the best backend after ``backend``: for a method that hands calls over often: it chooses once a kind."""
    return dispatcher(DECLARATIONS[function], recorded=False, after=backend)


def dispatcher(declaration: Declaration, recorded: bool = True, after: TEXBackendBase | None = None) -> Callable[..., Any]:
    """The public function of ``declaration``, of the backends ``after`` one, where that is given. ``recorded``: recorders of tex calls see its calls;
    not those that a backend makes inside another call."""
    name = declaration.name.removeprefix("prim_")
    names: dict[str, Any] = {}

    def bind(value: Any) -> str:
        names[f"_{len(names)}"] = value
        return f"_{len(names) - 1}"

    source = _source(declaration, name, bind, recorded)
    make = compiled(source, f"{__file__}: the dispatcher of {declaration.name}", "_make", names)
    asked = partial(blame, declaration), partial(check_before, declaration), partial(check_length, declaration)
    choose = partial(_chosen, declaration, after)
    call: Any = make(partial(key_maker, declaration), choose, here.get, current_scope, RecordedCall, registry.on_change, *asked)
    set_defaults(call, declaration.signature)
    call.__qualname__ = name
    call.__doc__ = declaration.doc
    call.__signature__ = declaration.signature
    call.__module__ = "fusible.tex.prim" if declaration.name.startswith("prim_") else "fusible.tex"
    return call


def _declared(function: str, of: str) -> Declaration:
    """The declaration of a function by its name. Raises ``MissingNameError`` for any other."""
    name = function.replace("prim.", "prim_") if isinstance(function, str) else None
    if name not in DECLARATIONS:
        got = f"{function!r}{nearest(name)}" if name is not None else f"a {type(function).__qualname__}"
        raise MissingNameError(expected("a function's name in tex", of=f"function of {of}", got=got, do="pass one of tex.coverage()"))
    return DECLARATIONS[name]


def explain(function: str, *args: Any, **kwargs: Any) -> Decision:
    """Who would serve ``tex.<function>(*args, **kwargs)``, and for each other backend why not. Nothing is computed.

    ``print(explain("gelu", x, None))`` shows it as text; ``function`` may name a function of ``tex.prim`` as ``"prim.add"``. Raises
    ``MissingNameError``, an ``AttributeError``, for a name that tex lacks.
    """
    declaration = _declared(function, "explain")
    return registry.decide(_request(declaration, _kinds(declaration, args, kwargs)))


def hand_over(backend: TEXBackendBase, function: str, *args: Any, **kwargs: Any) -> Any:
    """Serve a call by the best backend after ``backend``.

    A backend's method uses it to refuse a call for a value that its kinds do not show (a window, a probability), before it has written anything.
    Raises ``NotServedError`` where no other backend serves the call.
    """
    return method_after(backend, function, *args, **kwargs)(*args, **kwargs)


def method_after(backend: TEXBackendBase, function: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The method that ``hand_over`` calls."""
    declaration = _declared(function, "hand_over")
    request = _request(declaration, _kinds(declaration, args, kwargs))
    return checked_method(registry.choose_after(backend, request), declaration)


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
