"""Sizes that are known when a compiled function is called: integer expressions of named sizes.

A size in a shape is an int or a ``Size``. Arithmetic on either gives an int where the result is one. Expressions are kept as polynomials with a
canonical order, so that equal ones compare equal: ``(n + 1) * 2 == 2 * n + 2`` and ``(4 * n) // 4 == n``. ``==`` never evaluates: two different
expressions are unequal even where some values make them equal.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fusible.errors import ArgumentError, CompileError, expected

__all__ = [
    "Atom",
    "Call",
    "FUNCTIONS",
    "Size",
    "SizeLike",
    "Symbol",
    "assembled",
    "bounds",
    "concrete",
    "evaluate",
    "is_static",
    "maximum",
    "may_agree",
    "minimum",
    "plain",
    "product",
    "size_of",
    "symbol",
    "symbols",
    "unknown",
]


@dataclass(frozen=True)
class Symbol:
    """A named size that a call determines, from ``min`` to ``max``, and most often ``opt``."""

    name: str
    min: int
    opt: int
    max: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Call:
    """A function of sizes that no polynomial expresses: ``//``, ``%``, ``min`` or ``max``."""

    kind: str
    operands: tuple[SizeLike, ...]

    def __str__(self) -> str:
        if self.kind in ("//", "%"):
            return f"({self.operands[0]} {self.kind} {self.operands[1]})"
        return f"{self.kind}({', '.join(map(str, self.operands))})"


Atom = Symbol | Call
Monomial = tuple[Atom, ...]


class Size:
    """A polynomial of sizes with integer coefficients: ``terms`` maps products of sizes, in order, to their coefficients.

    A ``Size`` is never constant: a constant size is an int. Comparisons of order are decided by the bounds of its sizes, and raise ``CompileError``
    where the bounds do not decide. Its truth value is true.
    """

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self.terms = terms
        self._hash = hash(terms)

    def __eq__(self, other: object) -> bool:
        if type(other) is Size:
            return self is other or (self._hash == other._hash and self.terms == other.terms)
        return False if isinstance(other, int) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        parts = []
        for monomial, factor in self.terms:
            names = "*".join(map(str, monomial))
            parts.append(str(factor) if not names else names if factor == 1 else f"-{names}" if factor == -1 else f"{factor}*{names}")
        return " + ".join(parts).replace("+ -", "- ")

    __repr__ = __str__

    def __index__(self) -> int:
        raise unknown(f"the value of {self}")

    __int__ = __index__

    def __add__(self, other: SizeLike) -> SizeLike:
        return _sum(self, other, 1) if _is_size(other) else NotImplemented

    def __sub__(self, other: SizeLike) -> SizeLike:
        return _sum(self, other, -1) if _is_size(other) else NotImplemented

    def __rsub__(self, other: SizeLike) -> SizeLike:
        return _sum(other, self, -1) if _is_size(other) else NotImplemented

    def __mul__(self, other: SizeLike) -> SizeLike:
        return _product(self, other) if _is_size(other) else NotImplemented

    def __floordiv__(self, other: SizeLike) -> SizeLike:
        return _divided(self, other)[0] if _is_size(other) else NotImplemented

    def __rfloordiv__(self, other: SizeLike) -> SizeLike:
        return _divided(other, self)[0] if _is_size(other) else NotImplemented

    def __mod__(self, other: SizeLike) -> SizeLike:
        return _divided(self, other)[1] if _is_size(other) else NotImplemented

    def __rmod__(self, other: SizeLike) -> SizeLike:
        return _divided(other, self)[1] if _is_size(other) else NotImplemented

    def __neg__(self) -> SizeLike:
        return _product(self, -1)

    __radd__, __rmul__ = __add__, __mul__

    def __lt__(self, other: SizeLike) -> bool:
        return _decide(self, other)

    def __le__(self, other: SizeLike) -> bool:
        return not _decide(other, self)

    def __gt__(self, other: SizeLike) -> bool:
        return _decide(other, self)

    def __ge__(self, other: SizeLike) -> bool:
        return not _decide(self, other)


SizeLike = Any
"""An int or a ``Size``. Code that computes with sizes need not distinguish them, so it is ``Any`` for type checkers."""


def _is_size(value: object) -> bool:
    return type(value) is int or type(value) is Size


def unknown(what: str) -> CompileError:
    """The error of a decision that depends on the sizes of a call."""
    do = "record operations that are right for every size, or compile for a fixed size"
    return CompileError(expected("a size known when the function is compiled", of=what, got="one that each call determines", do=do))


def symbol(name: str, min: int, opt: int, max: int) -> SizeLike:
    """The size ``name``; an int where its bounds leave one value."""
    return min if min == max else Size((((Symbol(name, min, opt, max),), 1),))


def _terms(of: SizeLike) -> dict[Monomial, int]:
    return dict(of.terms) if isinstance(of, Size) else {(): of}


def assembled(terms: Mapping[Monomial, int]) -> SizeLike:
    """The polynomial with these coefficients."""
    kept = {monomial: factor for monomial, factor in terms.items() if factor}
    if not kept or set(kept) == {()}:
        return kept.get((), 0)
    return Size(tuple(_ordered(kept)))


def _ordered(terms: Mapping[Monomial, int]) -> list[tuple[Monomial, int]]:
    """The terms of a polynomial, of the highest degree first."""
    return sorted(terms.items(), key=lambda term: (-len(term[0]), tuple(map(str, term[0]))))


def _sum(a: SizeLike, b: SizeLike, sign: int) -> SizeLike:
    total = _terms(a)
    for monomial, factor in _terms(b).items():
        total[monomial] = total.get(monomial, 0) + sign * factor
    return assembled(total)


def _product(a: SizeLike, b: SizeLike) -> SizeLike:
    total: dict[Monomial, int] = {}
    for (left, m), (right, n) in itertools.product(_terms(a).items(), _terms(b).items()):
        both = tuple(sorted((*left, *right), key=str))
        total[both] = total.get(both, 0) + m * n
    return assembled(total)


def _quotient(a: Monomial, b: Monomial) -> Monomial | None:
    rest = list(a)
    for atom in b:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def _exact(a: SizeLike, b: SizeLike) -> SizeLike | None:
    """``q`` with ``q * b == a``, or nothing: long division by the leading terms."""
    rest, result = a, 0
    (lead, factor), *_ = _ordered(_terms(b))
    while rest != 0:
        (first, count), *_ = _ordered(_terms(rest))
        monomial = _quotient(first, lead)
        if monomial is None or count % factor:
            return None
        step = assembled({monomial: count // factor})
        result, rest = result + step, rest - step * b
    return result


def _divided(a: SizeLike, b: SizeLike) -> tuple[SizeLike, SizeLike]:
    """Quotient rounded down and remainder. Raises ``ArgumentError`` unless the divisor is positive for all sizes."""
    if bounds(b)[0] <= 0:
        do = "give its sizes a minimum of 1"
        raise ArgumentError(expected("a divisor that is positive for all sizes", of=f"the division of {a}", got=b, do=do))
    whole = _exact(a, b)
    if whole is not None:
        return whole, 0
    if isinstance(a, int) and isinstance(b, int):
        return divmod(a, b)
    # Whole multiples of an int divisor are divided term by term: (4 * n + 6) // 4 is n + 1 with the rest 2.
    part: SizeLike = 0
    if isinstance(b, int):
        part = assembled({monomial: factor // b for monomial, factor in _terms(a).items()})
        a = a - part * b
    low, high = bounds(a)
    if low >= 0 and high < bounds(b)[0]:
        return part, a
    return part + _call("//", a, b), _call("%", a, b)


def _call(kind: str, *operands: SizeLike) -> SizeLike:
    return Size((((Call(kind, operands),), 1),))


def _decide(a: SizeLike, b: SizeLike) -> bool:
    """Whether ``a < b`` for all sizes, or for none."""
    low, high = bounds(a - b)
    if high < 0:
        return True
    if low >= 0:
        return False
    raise unknown(f"the comparison of {a} with {b}")


def _extreme(kind: str, operands: Iterable[SizeLike]) -> SizeLike:
    kept: list[SizeLike] = []
    for new in operands:
        kept += [n for n in _flattened(kind, new) if n not in kept]
    for a in list(kept):
        if any(b != a and _beats(kind, b, a) for b in kept):
            kept.remove(a)
    return kept[0] if len(kept) == 1 else _call(kind, *sorted(kept, key=str))


def _flattened(kind: str, of: SizeLike) -> tuple[SizeLike, ...]:
    """The operands of ``of`` where it is the same function, else itself."""
    if isinstance(of, Size) and len(of.terms) == 1:
        ((monomial, factor),) = of.terms
        if factor == 1 and len(monomial) == 1 and isinstance(monomial[0], Call) and monomial[0].kind == kind:
            return monomial[0].operands
    return (of,)


def _beats(kind: str, a: SizeLike, b: SizeLike) -> bool:
    low, high = bounds(a - b)
    return low >= 0 if kind == "max" else high <= 0


def maximum(*operands: SizeLike) -> SizeLike:
    """The largest of sizes."""
    return _extreme("max", operands)


def minimum(*operands: SizeLike) -> SizeLike:
    """The smallest of sizes."""
    return _extreme("min", operands)


def is_static(shape: Iterable[SizeLike]) -> bool:
    """Whether every size is an int."""
    return not any(type(n) is Size for n in shape)


def bounds(of: SizeLike) -> tuple[int, int]:
    """An interval that contains every value of a size (the exact one where each of its sizes occurs once)."""
    if not isinstance(of, Size):
        return of, of
    low = high = 0
    for monomial, factor in of.terms:
        span = (factor, factor)
        for atom in monomial:
            corners = [a * b for a in span for b in _atom_bounds(atom)]
            span = (min(corners), max(corners))
        low, high = low + span[0], high + span[1]
    return low, high


def may_agree(a: SizeLike, b: SizeLike) -> bool:
    """Whether two sizes can be equal by their bounds. Where a dynamic size has to be equal to another, a condition of the program says so."""
    (low, high), (least, most) = bounds(a), bounds(b)
    return low <= most and least <= high


def _atom_bounds(atom: Atom) -> tuple[int, int]:
    if isinstance(atom, Symbol):
        return atom.min, atom.max
    spans = [bounds(n) for n in atom.operands]
    if atom.kind == "%":
        return 0, max(spans[1]) - 1
    if atom.kind == "//":
        corners = [a // b for a in spans[0] for b in spans[1]]
        return min(corners), max(corners)
    pick = min if atom.kind == "min" else max
    return pick(low for low, _ in spans), pick(high for _, high in spans)


def symbols(value: Any) -> set[Symbol]:
    """Every named size in a size, or in nested lists and tuples of them."""
    value = getattr(value, "expression", value)
    if isinstance(value, Size):
        atoms = [atom for monomial, _ in value.terms for atom in monomial]
        return {found for atom in atoms for found in ({atom} if isinstance(atom, Symbol) else symbols(atom.operands))}
    return {found for item in value for found in symbols(item)} if isinstance(value, list | tuple) else set()


FUNCTIONS: Mapping[str, Callable[..., int]] = {"//": lambda a, b: a // b, "%": lambda a, b: a % b, "min": min, "max": max}


def evaluate(of: SizeLike, values: Mapping[Symbol, int]) -> int:
    """A size for given values of its named sizes."""
    if not isinstance(of, Size):
        return of
    total = 0
    for monomial, factor in of.terms:
        for atom in monomial:
            known = values[atom] if isinstance(atom, Symbol) else FUNCTIONS[atom.kind](*[evaluate(n, values) for n in atom.operands])
            factor *= known
        total += factor
    return total


def concrete(value: Any, values: Mapping[Symbol, int]) -> Any:
    """``value`` with every size in it, and in nested lists and tuples, replaced by its number."""
    value = getattr(value, "expression", value)
    if isinstance(value, Size):
        return evaluate(value, values)
    if type(value) is tuple:
        return tuple([concrete(v, values) for v in value])
    return [concrete(v, values) for v in value] if isinstance(value, list) else value


def size_of(value: Any) -> SizeLike | None:
    """``value`` as a size: a whole number, a ``Size`` or a ``DimensionSize``; ``None`` for anything else (truth values too)."""
    if type(value) is int or type(value) is Size:
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return getattr(value, "expression", None)


def plain(shape: Iterable[Any]) -> tuple[Any, ...]:
    """A shape without ``DimensionSize``: ints and ``Size``."""
    return tuple([size_of(n) for n in shape])


def product(sizes: Iterable[Any]) -> SizeLike:
    """The product of sizes."""
    result: SizeLike = 1
    for n in map(size_of, sizes):
        assert n is not None
        result = result * n
    return result
