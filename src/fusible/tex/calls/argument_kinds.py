"""What the annotations of a declaration allow: for each annotation, which values it accepts and how an error message names it."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import NoneType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.tex import enums
from fusible.tex.calls.grouped import is_grouped
from fusible.tex.formats import is_quantized
from fusible.tex.interface.domains import is_flag
from fusible.tex.operands import kind
from fusible.tex.protocol import to_torch

__all__ = ["Kind", "ListOf", "Wrong", "is_tensor", "kind_of", "shown"]


class Wrong(NamedTuple):
    """Where in an argument the fault is, the kind that was expected there, and what came."""

    place: str
    kind: Kind
    got: str

    def error(self, owner: str) -> ArgumentError | DTypeError:
        """The error of a call of ``owner``."""
        return self.kind.error(expected(self.kind.what, of=f"{self.place} of {owner}", got=self.got, do="pass one"))


@dataclass(frozen=True)
class Kind:
    """``what`` an argument must be, in words, and whether a value ``accepts`` is that. ``at_once``: classes whose instances are, without a look."""

    what: str
    accepts: Callable[[Any], bool]
    error: type[ArgumentError] | type[DTypeError] = field(default=DTypeError, kw_only=True)
    at_once: frozenset[type] = field(default=frozenset(), kw_only=True)

    def wrong(self, value: Any, place: str) -> Wrong | None:
        """What is wrong with ``value``, which is at ``place``, or None."""
        return None if self.accepts(value) else Wrong(place, self, shown(value))

    def __or__(self, other: Kind | None) -> Kind:
        at_once = self.at_once | (other.at_once if other is not None else {NoneType})
        return _Either(f"{self.what} or {'None' if other is None else other.what}", self.accepts, self, other, at_once=at_once)

    def __ror__(self, other: None) -> Kind:
        return self | other


@dataclass(frozen=True)
class _Either(Kind):
    """One of two kinds, or None where there is but one."""

    first: Kind
    second: Kind | None = None

    def wrong(self, value: Any, place: str) -> Wrong | None:
        if value is None and self.second is None:
            return None
        found = self.first.wrong(value, place)
        if found is None or (self.second is not None and self.second.wrong(value, place) is None):
            return None
        return found if found.place != place else Wrong(place, self, shown(value))


def _is_list(x: Any) -> bool:
    return isinstance(x, list | tuple)  # torch.Size is a tuple


@dataclass(frozen=True)
class ListOf(Kind):
    """A list or tuple, each of whose items is of one kind."""

    item: Kind

    def wrong(self, value: Any, place: str) -> Wrong | None:
        if not self.accepts(value):
            return Wrong(place, self, shown(value))
        return next((found for i, item in enumerate(value) if (found := self.item.wrong(item, f"{place}[{i}]"))), None)


class _ListOfItems:
    """``Sequence[...]`` and ``list[...]`` of an annotation."""

    def __getitem__(self, item: Kind) -> Kind:
        plural = item.what.removesuffix(" or None").split(" ", 1)[-1]
        return ListOf(f"a list of {plural}s" if not plural.startswith("list") else f"a list of {plural}", _is_list, item)


class _IterableOf:
    """``Iterable[...]`` of an annotation. Its items are not looked at: they may come but once."""

    def __getitem__(self, item: Kind) -> Kind:
        return Kind(f"a list, each of {item.what}", lambda x: hasattr(x, "__iter__") and not isinstance(x, str | torch.Tensor))


@dataclass(frozen=True)
class _Tuple(Kind):
    """As many items as there are kinds, each of its own."""

    items: tuple[Kind, ...]

    def wrong(self, value: Any, place: str) -> Wrong | None:
        if not self.accepts(value) or len(value) != len(self.items):
            return Wrong(place, self, shown(value))
        each = zip(self.items, value, strict=True)
        return next((found for i, (kind, item) in enumerate(each) if (found := kind.wrong(item, f"{place}[{i}]"))), None)


class _TupleOf:
    """``tuple[..., ...]`` of an annotation."""

    def __getitem__(self, items: tuple[Any, ...]) -> Kind:
        if items[-1] is Ellipsis:
            return _ListOfItems()[items[0]]
        first, *more = [item.what for item in items]
        alike = f"{len(items)} {first.removeprefix('an ').removeprefix('a ')}s" if set(more) <= {first} else ", ".join([first, *more])
        return _Tuple(f"a tuple of {alike}", _is_list, items)


class _Whole(Kind):
    """``Callable[..., ...]`` or ``dict[..., ...]`` of an annotation: what stands in the brackets is not looked at."""

    def __getitem__(self, inside: Any) -> Kind:
        return self


def is_tensor(x: Any) -> bool:
    """Torch's tensors, quantized ones and their storages, and those of a room that registered how dispatch sees them."""
    if isinstance(x, torch.Tensor) or is_quantized(x) or is_grouped(x):
        return True
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return False
    found = kind(x)
    return isinstance(found, tuple) and len(found) > 1 and isinstance(found[-2], str)


def _is_generator(x: Any) -> bool:
    return isinstance(x, torch.Generator) or (is_tensor(x) and not isinstance(x, torch.Tensor))


def _is_int(x: Any) -> bool:
    return hasattr(x, "__index__") and (not isinstance(x, torch.Tensor) or (x.numel() == 1 and not x.is_floating_point()))


def _is_float(x: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return x.numel() == 1
    return hasattr(x, "__float__") or hasattr(x, "__index__")


def _is_positive(x: Any) -> bool:
    return _is_float(x) and not isinstance(x, torch.Tensor) and 0 < float(x) < math.inf


def _is_size(x: Any) -> bool:
    return _is_int(x) and int(x) >= 0


def _is_dtype(x: Any) -> bool:
    if isinstance(x, float):
        return False
    try:
        to_torch(x)
    except DTypeError:
        return x == enums.DType.kFloat4E2M1 if isinstance(x, int) else False
    return True


def _is_one_of(*dtypes: torch.dtype) -> Callable[[Any], bool]:
    known = {*dtypes, *(x for x in enums.DType if x is not enums.DType.kFloat4E2M1 and to_torch(x) in dtypes)}

    def accepts(x: Any) -> bool:
        if type(x) is enums.DType or type(x) is torch.dtype:
            return x in known
        return _is_dtype(x) and x != enums.DType.kFloat4E2M1 and to_torch(x) in dtypes

    return accepts


def _is_device(x: Any) -> bool:
    """Whether tensors can be made there: a device that torch knows may be one that this machine lacks. Another room's have a kind and an index."""
    if isinstance(getattr(x, "kind", None), str) and isinstance(getattr(x, "index", None), int):
        return True
    try:
        torch.empty(0, device=x)
    except (RuntimeError, TypeError, AssertionError):
        return False
    return True


def _names_device(x: Any) -> bool:
    """Whether ``x`` is a device, be it here or not."""
    try:
        return isinstance(x, torch.device) or torch.device(x) is not None
    except (RuntimeError, TypeError):
        return False


def _of_enum(cls: type[IntEnum]) -> Kind:
    values = {int(member) for member in cls}
    return Kind(f"a member of tex.{cls.__name__}", lambda x: _is_int(x) and int(x) in values, error=ArgumentError)


_SIZE = Kind("an integer of at least 0", _is_size, error=ArgumentError)
_INT = Kind("an integer", _is_int)
_NAMES: dict[str, Any] = {
    "Count": Kind("an integer of at least 1", lambda x: _is_int(x) and int(x) >= 1, error=ArgumentError),
    "DeviceName": Kind("a torch.device or its name", _names_device, error=ArgumentError),
    "Device": Kind("a device that torch has here", _is_device, error=ArgumentError),
    "DTypeLike": Kind("a torch.dtype, a tex.DType or its value", _is_dtype),
    "FP8Format": Kind("kFloat8E4M3 or kFloat8E5M2", _is_one_of(torch.float8_e4m3fn, torch.float8_e5m2)),
    "Positive": Kind("a finite number above 0", _is_positive, error=ArgumentError),
    "Generator": Kind("a torch.Generator", _is_generator),
    "GivenTensor": Kind("a tensor", is_tensor),
    "GroupedTensor": Kind("a grouped tensor", is_grouped),
    "QuantizedTensor": Kind("a quantized tensor", is_quantized),
    "Iterable": _IterableOf(),
    "Quantizer": Kind("a quantizer", lambda x: hasattr(x, "rowwise_usage") and hasattr(x, "columnwise_usage")),
    "Sequence": _ListOfItems(),
    "Shape": ListOf("a list of sizes", _is_list, _SIZE),
    "Tensor": Kind("a tensor", is_tensor),
    "bool": Kind("a bool", lambda x: x is None or is_flag(x)),  # which None is for NVIDIA's binding
    "float": Kind("a number", _is_float),
    "int": _INT,
    "list": _ListOfItems(),
    "torch": SimpleNamespace(
        Tensor=Kind("a torch.Tensor", lambda x: isinstance(x, torch.Tensor)),
        device=Kind("a device that torch has here", _is_device, error=ArgumentError),
        dtype=Kind("a torch.dtype", lambda x: isinstance(x, torch.dtype)),
    ),
    "str": Kind("a text", lambda x: isinstance(x, str)),
    **{name: _of_enum(cls) for name, cls in vars(enums).items() if isinstance(cls, type) and issubclass(cls, IntEnum) and cls is not IntEnum},
}
"""The words that an annotation is made of."""


_MAPPING = _Whole("a mapping", lambda x: isinstance(x, Mapping))
_ANYTHING = Kind("anything", lambda x: True)
_PYTHONS = {
    **{
        name: _NAMES[name]
        for name in ("Count", "DeviceName", "FP8Format", "Iterable", "Positive", "Sequence", "float", "int", "list", "str", "torch")
    },
    "Any": _ANYTHING,
    "Callable": _Whole("a function", callable),
    "Mapping": _MAPPING,
    "bool": Kind("a bool", is_flag, at_once=frozenset({bool})),
    "dict": _MAPPING,
    "tuple": _TupleOf(),
}
"""Those of every room."""


@functools.cache
def _kind(text: str) -> Kind | None:
    return _evaluated(text, _NAMES)


def kind_of(annotation: Any, known: Mapping[str, Any] | None = None) -> Kind | None:
    """The kind that an annotation stands for, given as text or as a plain class; None for an annotation that is not known here.

    ``known`` replaces the names of the interface: it holds kinds, or objects that have kinds as attributes. Python's own names stay.
    """
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return _kind(text) if known is None else _evaluated(text, {**_PYTHONS, **known})


def _evaluated(text: str, names: Mapping[str, Any]) -> Kind | None:
    try:
        found = eval(text, {"__builtins__": {}}, names)  # the text is an annotation of ours, or of a plugin's code
    except (AttributeError, NameError, SyntaxError, TypeError):
        return None
    return found if isinstance(found, Kind) and found is not _ANYTHING else None


def shown(value: Any) -> str:
    """A value in a sentence: short, on one line."""
    if value is None or isinstance(value, bool | int | float | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) < 40 else value[:37] + "...")
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    if inspect.isclass(value):
        return f"the class {value.__qualname__}"
    return type(value).__qualname__
