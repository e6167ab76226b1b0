"""What the arguments of a tex function may be, told by their annotations: members of an enumeration, numbers with a domain, dtypes.

A declaration that says ``eps: Epsilon`` or ``attn_mask_type: NVTE_Mask_Type`` has its calls checked: the dispatcher puts the test of each such
argument, a comparison or two, before everything else, for every backend alike. What passes is handed on as it came,
but a flag of None as False.
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import NoneType
from typing import Annotated, Any, ClassVar

import torch

from fusible.errors import ArgumentError, DTypeError, FusibleError, expected
from fusible.tex import enums
from fusible.tex.enums import DType
from fusible.tex.protocol import FLOAT64, FLT_MAX, INT64, to_torch

__all__ = [
    "AnyDType",
    "BooleanNumber",
    "Count",
    "DTypes",
    "Decay",
    "Domain",
    "Enumeration",
    "Epsilon",
    "FP8DType",
    "Finite",
    "Flag",
    "FloatingDType",
    "GivenDType",
    "GivenTensor",
    "Indices",
    "Integers",
    "Lengths",
    "Limit",
    "NAMES",
    "Number",
    "Positive",
    "Presence",
    "Probability",
    "RealDType",
    "Size",
    "domain_of",
    "is_flag",
]


@dataclass(frozen=True)
class Domain:
    """What an argument may be. ``what`` and ``do`` are the parts of the sentence that refuses another."""

    what: str
    do: str
    refusal: ClassVar[type[FusibleError]] = ArgumentError

    def fast(self, argument: str, bind: Callable[[Any], str]) -> str:
        """A Python expression that is true where ``argument`` surely belongs; ``bind(value)`` gives a name that stands for a value in it. Where the
        argument stands for another value, the expression assigns that one to it."""
        raise NotImplementedError

    def holds(self, value: Any) -> bool:
        """Whether ``value`` belongs. Raises ``TypeError`` where its type already does not."""
        raise NotImplementedError

    def check(self, value: Any, argument: str, function: str) -> None:
        """Raise ``ArgumentError``, or ``DTypeError`` for what is of another type altogether, unless ``value`` belongs."""
        try:
            error = None if self.holds(value) else self.refusal
        except (TypeError, ValueError):  # a tensor of several elements is no number, says torch by a ValueError
            error = DTypeError
        if error is not None:
            raise error(expected(self.what, of=f"{argument} of {function}", got=_shown(value), do=self.do))


def _shown(value: Any) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


@dataclass(frozen=True)
class Enumeration(Domain):
    """A member of ``members``, of another package's enumeration of the same name, or the integer that stands for one."""

    members: type[IntEnum]

    def fast(self, argument: str, bind: Callable[[Any], str]) -> str:
        values = frozenset(member.value for member in self.members)
        return f"type({argument}) is {bind(self.members)} or type({argument}) is int and {argument} in {bind(values)}"

    def holds(self, value: Any) -> bool:
        if isinstance(value, (bool, torch.Tensor)):
            raise TypeError
        if isinstance(value, Enum):
            return type(value).__name__ == self.members.__name__ and value.name in self.members.__members__
        return operator.index(value) in {member.value for member in self.members}


@dataclass(frozen=True)
class Number(Domain):
    """``lower <= value <= upper``, or ``< upper`` and ``> lower`` where these are ``open``; an integer where ``kind`` is int."""

    kind: type
    lower: float
    upper: float
    open_lower: bool = False
    open_upper: bool = False

    def fast(self, argument: str, bind: Callable[[Any], str]) -> str:
        if self.lower == -math.inf and self.upper == math.inf:
            return f"type({argument}) is {self.kind.__name__}"
        lower = "" if self.lower == -math.inf else f"{self.lower!r} {'<' if self.open_lower else '<='} "
        upper = "" if self.upper == math.inf else f" {'<' if self.open_upper else '<='} {self.upper!r}"
        return f"type({argument}) is {self.kind.__name__} and {lower}{argument}{upper}"

    def holds(self, value: Any) -> bool:
        if isinstance(value, (str, Enum)) or (self.kind is int and not hasattr(value, "__index__")):
            raise TypeError
        if not isinstance(value, (int, float)):
            if not hasattr(value, "__index__" if self.kind is int else "__float__"):
                raise TypeError
            if _unknown(value):
                return True
            value = self.kind(operator.index(value) if self.kind is int else float(value))
        if self.lower == -math.inf and self.upper == math.inf:
            return True
        above = value > self.lower if self.open_lower else value >= self.lower
        return above and (value < self.upper if self.open_upper else value <= self.upper)


def _unknown(value: Any) -> bool:
    """Whether ``value`` stands for a number that is not there yet: one of a traced program, or on a device that would have to be waited for."""
    return not (isinstance(value, numbers.Real) or (type(value) is torch.Tensor and value.is_cpu))


@dataclass(frozen=True)
class Flag(Domain):
    """True or False, Python's or numpy's, or 0 or 1. The truth of anything else is a guess: ``"no"`` is true, and backends test it each
    in a way of its own. None is False, as NVIDIA's binding casts it; backends are handed False in its place."""

    refusal = DTypeError

    def fast(self, argument: str, bind: Callable[[Any], str]) -> str:
        return f"{argument} is True or {argument} is False or ({argument} is None and ({argument} := False) is False)"

    def holds(self, value: Any) -> bool:
        return value is None or is_flag(value)


def is_flag(value: Any) -> bool:
    """Whether ``value`` is True or False, or a number that is one of the two for Python: 0, 1, or numpy's own."""
    if type(value) is bool or (type(value) is int and value in (0, 1)):
        return True
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")  # numpy is not imported for it


@dataclass(frozen=True)
class Presence(Domain):
    """Anything but None: of a parameter that must be given, after one that need not be."""

    refusal = DTypeError

    def fast(self, argument: str, bind: Callable[[Any], str]) -> str:
        return f"{argument} is not None"

    def holds(self, value: Any) -> bool:
        return value is not None


@dataclass(frozen=True)
class Integers(Domain):
    """A tensor of int32, of ``rank`` dimensions (0: any number): lengths and indices. A call's key holds dtype and rank, so each combination is
    tested once. Backends check the values."""

    rank: int
    refusal = DTypeError

    def holds(self, value: Any) -> bool:
        if not hasattr(value, "dtype") or not hasattr(value, "ndim"):
            raise TypeError
        return to_torch(value.dtype) is torch.int32 and (not self.rank or value.ndim == self.rank)


@dataclass(frozen=True)
class DTypes(Domain):
    """One of ``dtypes``: as a ``torch.dtype``, a ``tex.DType``, another package's, the integer of one, or a dtype of a registered framework."""

    dtypes: frozenset[torch.dtype]
    refusal = DTypeError

    def fast(self, argument: str, bind: Callable[[Any], str]) -> str:
        known = self.dtypes | {dtype for dtype in DType if dtype != DType.kFloat4E2M1 and to_torch(dtype) in self.dtypes}
        usual = "".join(f"{argument} is {bind(dtype)} or " for dtype in _USUAL if dtype in self.dtypes)
        return f"{usual}(type({argument}) is {bind(torch.dtype)} or type({argument}) is {bind(DType)}) and {argument} in {bind(known)}"

    def holds(self, value: Any) -> bool:
        if isinstance(value, (bool, float, str, torch.Tensor)) or (isinstance(value, Enum) and type(value).__name__ != DType.__name__):
            raise TypeError
        if self.dtypes is _STORED and not isinstance(value, torch.dtype) and value == DType.kFloat4E2M1:
            return True
        return to_torch(value) in self.dtypes


def _number(what: str, lower: float = -FLT_MAX, upper: float = FLT_MAX, **open_ends: bool) -> Number:
    return Number(what, "pass such a number", float, lower, upper, **open_ends)


def _integer(what: str, lower: int, upper: float = math.inf) -> Number:
    return Number(what, "pass such an integer", int, lower, upper)


_FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16})
_USUAL = torch.float32, torch.bfloat16
_STORED = frozenset(to_torch(value) for value in (*(d for d in DType if d != DType.kFloat4E2M1), INT64, FLOAT64))

Finite = Annotated[float, _number("a finite number")]
Positive = Annotated[float, _number("a finite number above 0", 0.0, open_lower=True)]
Epsilon = Annotated[float, _number("a finite number of at least 0", 0.0)]
Probability = Annotated[float, _number("a probability in [0, 1)", 0.0, 1.0, open_upper=True)]
Decay = Annotated[float, _number("a decay in [0, 1)", 0.0, 1.0, open_upper=True)]
Limit = Annotated[float, _number("a number of at least 0", 0.0, math.inf)]
Count = Annotated[int, _integer("an integer of at least 1", 1)]
Size = Annotated[int, _integer("an integer of at least 0", 0)]
BooleanNumber = Annotated[int, _integer("0 or 1", 0, 1)]
Lengths = Annotated[Any, Integers("an int32 tensor of one dimension", "cast the cumulative lengths [b + 1], or flatten them", 1)]
Indices = Annotated[Any, Integers("an int32 tensor", "cast it", 0)]
GivenTensor = Annotated[Any, Presence("a tensor", "pass it: it has no default")]
GivenDType = Annotated[Any, Presence("a dtype", "pass it: it has no default")]
FloatingDType = Annotated[Any, DTypes("float32, bfloat16 or float16", "pass the torch.dtype or the tex.DType of one", _FLOATING)]
RealDType = Annotated[Any, DTypes("float32, bfloat16, float16 or float64", "pass the torch.dtype of one", _FLOATING | {torch.float64})]
FP8DType = Annotated[Any, DTypes("kFloat8E4M3 or kFloat8E5M2", "pass one of the two", frozenset({torch.float8_e4m3fn, torch.float8_e5m2}))]
AnyDType = Annotated[Any, DTypes("a type that tex has", "pass a torch.dtype, a tex.DType or its value", _STORED)]


def _named() -> dict[str, Domain]:
    anything = -math.inf, math.inf
    domains: dict[str, Domain] = {
        "bool": Flag("a bool", "pass True or False"),
        "float": Number("a number", "pass a number", float, *anything),
        "int": Number("an integer", "pass an integer", int, *anything),
    }
    for name in enums.__all__:
        if name != "DType":
            domains[name] = Enumeration(f"a member of {name}", f"pass a tex.{name}", getattr(enums, name))
    for name, value in vars(sys.modules[__name__]).items():
        if hasattr(value, "__metadata__"):
            domains[name] = value.__metadata__[0]
    return domains


_DOMAINS = _named()

NAMES = sorted(name for name, value in globals().items() if hasattr(value, "__metadata__"))
"""The annotations of this file, for stubs."""


def domain_of(annotation: Any) -> tuple[Domain | None, bool]:
    """``(domain, optional)`` of a parameter's annotation, as text or as a type: what its arguments may be (None: anything), and whether None too."""
    if not isinstance(annotation, str):
        return _of_type(annotation)
    name, _, rest = annotation.partition(" | ")
    return _DOMAINS.get(name), rest == "None"


def _of_type(annotation: Any) -> tuple[Domain | None, bool]:
    options = [option for option in getattr(annotation, "__args__", ()) if option is not NoneType]
    if len(options) == 1 and len(getattr(annotation, "__args__", ())) == 2:
        return _of_type(options[0])[0], True
    found = next((domain for domain in getattr(annotation, "__metadata__", ()) if isinstance(domain, Domain)), None)
    if found is None and isinstance(annotation, type) and issubclass(annotation, IntEnum) and annotation is not DType:
        found = Enumeration(f"a member of {annotation.__name__}", f"pass an {annotation.__name__}", annotation)
    return found, False
