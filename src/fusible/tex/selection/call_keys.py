"""The key of a call in dispatch: what decides who serves it, and what shows whether it is as declared.

Every call pays for this. So nothing is looked at twice, the entry of a tensor on a CPU is its dtype alone, and any other kind stands in a tuple of
its own, where no dtype that is passed for a tensor can be taken for one. The cpu backend brings a compiled function of equal keys: to read a tensor's
dtype and device by name costs 80 ns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from fusible.errors import FusibleError
from fusible.tex.calls.argument_kinds import kind_of
from fusible.tex.calls.call_text import compiled
from fusible.tex.interface.declare import Declaration
from fusible.tex.interface.domains import DTypes, Enumeration, Integers, Presence, domain_of
from fusible.tex.operands import KINDS, is_dense, not_dense, sort

__all__ = ["Keys", "arguments_of", "check_integers", "check_layouts", "compile_keys_by", "key_maker", "kinds_in", "python_key_maker"]

_ENTRIES = {
    "v": "{x}",
    "m": "({x} if _type({x}) is _int or _type({x}) is _dtype else _kinds[_type({x})]({x}))",
    "c": "_type({x})",
    "s": "(None if {x} is None else _sort({x}))",
    "k": "(None if {x} is None else {x}.dtype if {on_cpu} else _other({x}))",
    "d": "(None if {x} is None else {x}.dtype if {on_cpu} else _sort({x}))",
    "p": "(None if {x} is None else True if {on_cpu} else _sort({x}))",
    "i": "(None if {x} is None else {x}.ndim if {on_cpu} and {x}.dtype is _int32 else _integers({x}))",
    "j": "(None if {x} is None else True if {on_cpu} and {x}.dtype is _int32 else _integers({x}))",
}
"""What a key holds of an argument ``x``, by a letter.

``v``: itself, of a flag that decides. ``m``: itself or its kind, of a member of an enumeration or a dtype. ``c``: its class, of values and lists:
the sorts of all that is in a list would cost more than the rest of the call, and are left to who reads it. ``s``: its sort. Of a tensor: ``k`` its
kind, if it decides, and its layout where it is not dense; beside those ``d`` its sort, whose dtype is declared, or ``p`` that it is there; ``i`` its
rank, if it is of int32, ``j`` that it is of int32.
"""

_ON_CPU = "(_type({x}) is _tensor or _type({x}) is _parameter) and {x}.is_cpu and {x}.layout is _strided"


def _other(x: Any) -> tuple[Hashable, ...]:
    return (KINDS[type(x)](x),) if is_dense(x) else (KINDS[type(x)](x), x.layout)


def _integers(x: object) -> Hashable:
    kind, *layout = _other(x)
    return kind, type(x), getattr(x, "ndim", None), *layout


_NAMES = {
    "_type": type,
    "_int": int,
    "_dtype": torch.dtype,
    "_tensor": torch.Tensor,
    "_parameter": torch.nn.Parameter,
    "_int32": torch.int32,
    "_strided": torch.strided,
    "_other": _other,
    "_kinds": KINDS,
    "_sort": sort,
    "_integers": _integers,
}


def arguments_of(declaration: Declaration) -> tuple[str, ...]:
    """The arguments that are in a call's key: those that decide, and beside them those whose class or dtype is declared."""
    return tuple(p.name for p in _in_key(declaration))


Keys = Callable[..., tuple[Any, ...]]


def _not_compiled(entries: bytes, kinds: Any, sort: Any, integers: Any) -> Keys | None:
    return None


_compile = _not_compiled


def compile_keys_by(make: Callable[[bytes, Any, Any, Any], Keys | None]) -> None:
    """Let ``make(entries, kinds, sort, integers)`` bring the function that computes the keys of a declaration from as many arguments as there are
    letters in ``entries``, or None where it cannot. The others describe what is no tensor on a CPU: ``kinds[type(x)](x)``, ``sort(x)`` and
    ``integers(x)``, of an index tensor."""
    global _compile
    _compile = make


def key_maker(declaration: Declaration) -> Keys:
    """The function that computes a call's key from ``arguments_of(declaration)``: the compiled one, where there is one."""
    return _compile("".join(_letters(declaration)).encode(), KINDS, sort, _integers) or python_key_maker(declaration)


def python_key_maker(declaration: Declaration) -> Keys:
    """The same in Python, of equal keys."""
    names = arguments_of(declaration)
    entries = (_ENTRIES[letter].format(x=x, on_cpu=_ON_CPU.format(x=x)) for x, letter in zip(names, _letters(declaration), strict=True))
    source = f"def key({', '.join(names)}):\n    return ({''.join(f'{entry}, ' for entry in entries)})\n"
    return compiled(source, f"{__file__}: the key of {declaration.name}", "key", dict(_NAMES))


def kinds_in(declaration: Declaration, key: tuple[Any, ...]) -> tuple[Hashable, ...]:
    """The kinds (``fusible.tex.operands``) of the arguments that decide, of which ``key`` has the entries."""
    return tuple(_kind_in(letter, entry) for letter, entry, _ in zip(_letters(declaration), key, declaration.asks, strict=False))


def check_integers(declaration: Declaration, arguments: Mapping[str, Any]) -> None:
    """Raise for the first argument that is declared as lengths or indices, and is of another dtype or rank: both are in a call's key."""
    for name, value in arguments.items():
        domain, optional = domain_of(declaration.signature.parameters[name].annotation)
        if isinstance(domain, Integers) and not (value is None and optional):
            try:
                domain.check(value, name, declaration.name.removeprefix("prim_"))
            except FusibleError as error:
                error.argument = name
                raise


def check_layouts(declaration: Declaration, arguments: Mapping[str, Any]) -> None:
    """Raise ``ArgumentError`` for the first argument that is a sparse tensor, or one of another library's layout. Layouts are part of a call's key.
    Tensors in lists are checked by the kernels that read them."""
    for name, value in arguments.items():
        if not is_dense(value):
            error = not_dense(value, f"{name} of {declaration.name.removeprefix('prim_')}")
            error.argument = name
            raise error


def _kind_in(letter: str, entry: Any) -> Hashable:
    if entry is None or letter in "vm":
        return entry
    if isinstance(entry, tuple):
        return entry[0]
    return "cpu", entry if isinstance(entry, torch.dtype) else torch.int32


def _in_key(declaration: Declaration) -> list[inspect.Parameter]:
    deciding = [declaration.signature.parameters[ask] for ask in declaration.asks]
    if declaration.unserved:  # which it says of any call
        return deciding
    return deciding + [p for p in declaration.signature.parameters.values() if p.name not in declaration.asks and _is_looked_at(p)]


def _is_looked_at(p: inspect.Parameter) -> bool:
    """Whether an argument beside those that decide has a declared class or dtype that no test before answers for."""
    domain = domain_of(p.annotation)[0]
    told = isinstance(domain, Presence | Integers) or (domain is None and isinstance(p.annotation, str) and kind_of(p.annotation) is not None)
    return told and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)


def _letters(declaration: Declaration) -> Sequence[str]:
    return [_letter(declaration, p) for p in _in_key(declaration)]


def _letter(declaration: Declaration, p: inspect.Parameter) -> str:
    domain = domain_of(p.annotation)[0]
    if isinstance(domain, Integers):
        return "i" if domain.rank else "j"
    if p.name in declaration.asks:
        return "v" if p.annotation in _PLAIN else "m" if isinstance(domain, DTypes | Enumeration) else "k"
    if p.annotation.startswith(_TENSORS):
        return "d" if p.name in declaration.where else "p"
    return "c" if p.annotation.startswith(_LISTS) or p.annotation in _VALUES else "s"


_PLAIN = ("bool", "int", "str", bool, int, str)
"""Annotations of arguments that are their own kind."""
_VALUES = ("str", "Device", "Device | None", "DTypeLike")
"""Annotations of arguments that are no lists and hold no tensors."""
_LISTS = ("Sequence[", "list[", "Shape")
_TENSORS = ("Tensor", "torch.Tensor", "GivenTensor")
"""What annotations of lists and of tensors begin with."""
