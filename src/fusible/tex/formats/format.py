"""A number format is one value, and so is how quantizers scale to it: their names, how their tensors are recognised, what these consist of.

Whatever the backend: nothing here computes. Our own classes state their value (``_FORMAT`` of a storage, ``_SCHEME`` of a quantizer); NVIDIA's are
recognised by their attributes.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.tex.protocol import QuantizerLike, to_torch

__all__ = [
    "Format",
    "PLAIN",
    "Scheme",
    "a_buffer",
    "format_named",
    "format_of",
    "is_quantized",
    "logical_shape",
    "nominal",
    "scaling",
    "scheme_named",
    "scheme_of",
    "usages",
]


@dataclass(frozen=True)
class Marks:
    """Attributes by which a foreign object is recognised: it has all of ``has`` and none of ``lacks``."""

    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    def fit(self, x: object) -> bool:
        return all(hasattr(x, name) for name in self.has) and not any(hasattr(x, name) for name in self.lacks)


class Format(ABC):
    """A number format. There is one object of each class: two formats are equal where they are the same object. Its name is its own: a class that has
    the name of another one raises ``ArgumentError``, unless it is that class, defined again.

    A quantized tensor has a row-wise copy of its data, a column-wise one, or both.
    """

    name: ClassVar[str]
    """What a call's kinds and errors call it."""
    marks: ClassVar[Marks | None] = None
    """Of NVIDIA's tensors; None where there are none."""
    per_tensor: ClassVar[bool] = False
    """Whether a tensor has one scale."""
    block_scaled: ClassVar[bool] = False
    """Whether it has one for each block of its elements, and is a ``BlockFormat``."""
    gathers: ClassVar[bool] = False
    """Whether parts of the rows, quantized apart and concatenated, are the quantized whole, as long as no block is cut."""
    packed: ClassVar[int] = 1
    """Elements in a byte of data."""
    transposed: ClassVar[bool] = True
    """Whether column-wise data lies as ``[K, *leading]``."""
    member_fields: ClassVar[Mapping[str, str]] = {}
    """Each buffer of a grouped tensor, and the attribute that holds a member's part of it."""
    scale_fields: ClassVar[tuple[str, ...]] = ()
    """The constructor's arguments of a storage that are proportional to its values. A power of two is multiplied into them where they are fp32, or
    exponents."""
    scales_are_exponents: ClassVar[bool] = False
    """Whether these scales are powers of two, stored as exponents plus 127."""

    def __init_subclass__(cls) -> None:
        if "name" in cls.__dict__:
            known = _FORMATS_BY_NAME.get(cls.name)
            if known is not None and not _same_class(type(known), cls):
                raise _taken(cls.name, f"the format {cls.__module__}.{cls.__qualname__}", type(known))
            _FORMATS_BY_NAME[cls.name] = cls()

    @classmethod
    def value(cls) -> Any:
        """The only object of this class."""
        return _FORMATS_BY_NAME[cls.name]

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__

    def __reduce__(self) -> Any:
        return format_named, (self.name,)

    def copies(self, x: Any) -> tuple[Any, Any]:
        """The row-wise and the column-wise data of a tensor; None for what it lacks."""
        return x._rowwise_data, x._columnwise_data

    def element(self, x: Any) -> Any:
        """The type of a tensor's elements."""
        return x._fp8_dtype

    def buffer(self, x: Any) -> Any:
        """A buffer of a tensor, on the tensor's device."""
        rowwise, columnwise = self.copies(x)
        if rowwise is None and columnwise is None:
            raise _without_data()
        return rowwise if rowwise is not None else columnwise

    def shape(self, x: Any) -> tuple[int, ...]:
        """The shape that a tensor stands for, from whichever copy it has."""
        rowwise, columnwise = self.copies(x)
        data = rowwise if rowwise is not None else columnwise
        if data is None:
            raise _without_data()
        shape = tuple(data.shape)
        if self.packed > 1:
            shape = (*shape[:-1], self.packed * shape[-1])
        return shape if rowwise is not None or not self.transposed else (*shape[1:], shape[0])


def _same_class(one: type, other: type) -> bool:
    """Whether two classes are one, perhaps defined again."""
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def _taken(name: str, of: str, by: type) -> ArgumentError:
    """The error for a name that types and calls read as another format's."""
    got = f"{name!r}, which {by.__module__}.{by.__qualname__} has"
    return ArgumentError(expected("a name of its own", of=of, got=got, do="choose another: types and calls name it"))


def _without_data() -> ArgumentError:
    return ArgumentError(expected("row-wise or column-wise data", of="a quantized tensor", got="neither", do="quantize it again"))


_FORMATS_BY_NAME: dict[str, Format] = {}


class Plain(Format):
    """No quantization: a tensor is its own data."""

    name = "none"

    def element(self, x: Any) -> Any:
        return x.dtype

    def buffer(self, x: Any) -> Any:
        return x

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.shape)


PLAIN: Plain = Plain.value()


@dataclass(frozen=True, eq=False, repr=False)
class Scheme:
    """How quantizers scale to a format: the quantization scheme.

    ``name``: what recipes, types and a call's kinds call it; ``marks``: those of NVIDIA's quantizers; ``delayed``: whether the scale is known before
    the tensor is, and its amax is kept for later scales.
    """

    name: str
    format: Format
    marks: Marks | None = None
    delayed: bool = False

    def __post_init__(self) -> None:
        known = _SCHEMES_BY_NAME.get(self.name)
        if known is not None and not (
            _same_class(type(known.format), type(self.format)) and (known.marks, known.delayed) == (self.marks, self.delayed)
        ):
            raise _taken(self.name, f"a Scheme of {self.format}", type(known.format))
        _SCHEMES_BY_NAME[self.name] = self

    def __repr__(self) -> str:
        return self.name

    __str__ = __repr__

    def __reduce__(self) -> Any:
        return scheme_named, (self.name,)

    @property
    def per_tensor(self) -> bool:
        return self.format.per_tensor


_SCHEMES_BY_NAME: dict[str, Scheme] = {}
_UNQUANTIZED = Scheme("none", PLAIN)


def format_named(name: Any) -> Format | None:
    """The format that a call's kinds name, by its own name or by that of a scheme; None where it is neither."""
    scheme = _SCHEMES_BY_NAME.get(name)
    return _FORMATS_BY_NAME.get(name) if scheme is None else scheme.format


def scheme_named(name: str) -> Scheme | None:
    """The scheme of that name, if there is one."""
    return _SCHEMES_BY_NAME.get(name)


_SCHEMES: dict[type, Scheme] = {type(None): _UNQUANTIZED}
_FORMATS: dict[type, Format] = {torch.Tensor: PLAIN, torch.nn.Parameter: PLAIN}


def scheme_of(quantizer: object) -> Scheme:
    """How ``quantizer`` scales; a class answers once for all of its instances. None has the scheme ``"none"``."""
    known = _SCHEMES.get(type(quantizer))
    return known if known is not None else _recognise(quantizer)


def _recognise(quantizer: object) -> Scheme:
    found = getattr(quantizer, "_SCHEME", None)
    if not isinstance(found, Scheme):
        found = next((scheme for scheme in _SCHEMES_BY_NAME.values() if scheme.marks is not None and scheme.marks.fit(quantizer)), None)
    if found is None:
        wanted = "delayed or current scaling, FP8 blocks, MXFP8 or NVFP4"
        raise DTypeError(expected(wanted, of="a quantizer", got=type(quantizer).__qualname__, do="use such a quantizer or another backend"))
    _SCHEMES[type(quantizer)] = found
    return found


def scaling(quantizer: object) -> str:
    """The name of ``quantizer``'s scheme: ``"none"`` for None."""
    return scheme_of(quantizer).name


def format_of(x: object) -> Format:
    """The format of a quantized tensor or of its bare storage, ``PLAIN`` of anything else. A class answers once for all of its instances."""
    known = _FORMATS.get(type(x))
    if known is None:
        known = getattr(x, "_FORMAT", None)
        if not isinstance(known, Format):
            known = next((form for form in _FORMATS_BY_NAME.values() if form.marks is not None and form.marks.fit(x)), PLAIN)
        _FORMATS[type(x)] = known
    return known


def is_quantized(x: object) -> bool:
    """Whether ``x`` is a quantized tensor of any format, or its bare storage."""
    return format_of(x) is not PLAIN


def a_buffer(x: Any) -> Any:
    """``x`` itself, or one of its buffers where it is quantized: a tensor on the device of ``x``."""
    return format_of(x).buffer(x)


def logical_shape(x: Any) -> tuple[int, ...]:
    """The shape of a tensor, or the one that a quantized tensor stands for, from whichever buffer it has."""
    return format_of(x).shape(x)


def nominal(x: Any) -> torch.dtype:
    """The dtype of a tensor, or the unquantized one that a quantized tensor stands for."""
    if not is_quantized(x):
        return x.dtype
    dtype = getattr(x, "_dtype", None)
    return torch.float32 if dtype is None else to_torch(dtype)


def usages(quantizer: QuantizerLike) -> tuple[bool, bool]:
    """``(rowwise, columnwise)`` of a quantizer; one of the two must be asked for."""
    if not (quantizer.rowwise_usage or quantizer.columnwise_usage):
        raise ArgumentError(expected("rowwise or columnwise usage", of="a quantizer", got="neither", do="set one of the two usages"))
    return quantizer.rowwise_usage, quantizer.columnwise_usage
