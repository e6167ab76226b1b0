"""Element types and the richer types that a tensor can be asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, TypeAlias, TypeGuard

from fusible.errors import DTypeError, expected
from fusible.quantized import Float8CurrentScalingQuantizer, HybridQuantizer, IdentityQuantizer, Quantizer
from fusible.tex.formats import BlockFormat, Scheme, scaling, scheme_named

__all__ = ["DType", "QuantizedType", "Type", "accumulator", "bit_width", "dtype_name", "element", "is_fp8", "is_quantized_type"]


class DType(IntEnum):
    """Element types, numbered as in NVIDIA's C++ interface, which has no Float64, so that tex takes them as they are."""

    Byte = 0
    Int32 = 2
    Int64 = 3
    Float32 = 4
    Float16 = 5
    BFloat16 = 6
    Float8E4M3 = 7
    Float8E5M2 = 8
    Float4E2M1 = 10
    Float64 = 64

    def __str__(self) -> str:
        return _FORMS[self][0]


_FORMS = {
    DType.Byte: ("byte", 8),
    DType.Int32: ("int32", 32),
    DType.Int64: ("int64", 64),
    DType.Float32: ("fp32", 32),
    DType.Float16: ("fp16", 16),
    DType.BFloat16: ("bf16", 16),
    DType.Float8E4M3: ("e4m3", 8),
    DType.Float8E5M2: ("e5m2", 8),
    DType.Float4E2M1: ("e2m1", 4),
    DType.Float64: ("fp64", 64),
}
"""The name that is printed, and the bits of an element."""
_FP8 = frozenset({DType.Float8E4M3, DType.Float8E5M2})
_LOW = _FP8 | {DType.Float4E2M1}


@dataclass(frozen=True)
class QuantizedType:
    """An element type of 8 or 4 bits together with how it is scaled, and which copies are made. ``Byte`` stands for elements that a block format of
    the caller's alone can read, as integers.

    ``scaling`` names a scheme (``scheme``): ``"delayed"`` (by the scale that the running pass holds under the name ``slot``) or what ``quantizer``
    does, as ``"current"`` or ``"mxfp8"``; or it is what no backend of tex knows: ``"hybrid"``, ``"identity"``, ``"custom"``. The quantizer is a
    template and not called itself; under current scaling it may be left out. ``rowwise`` and ``columnwise`` say along which of its dimensions
    products read the tensor: a tensor with one scale is read either way. ``logical``: of a tensor that was padded to whole blocks, its shape without
    what was added; types that differ in it alone are equal.
    """

    dtype: DType
    scaling: str
    slot: str = ""
    quantizer: Quantizer | None = None
    rowwise: bool = True
    columnwise: bool = False
    logical: tuple[int, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.applied and self.scaling not in (*_APPLIED.values(), "custom"):
            of, do = "the scaling of a QuantizedType", "name one, or import what brings it"
            raise DTypeError(expected("a scheme that there is", of=of, got=repr(self.scaling), do=do))
        if self.dtype not in _LOW and not self.applied and not (self.dtype is DType.Byte and self.blocks is not None):
            raise DTypeError(expected("an element type of 8 or 4 bits", of="a QuantizedType", got=str(self.dtype), do="use Float8E4M3 or Float8E5M2"))
        if self.per_tensor and not self.delayed and self.quantizer is None:
            object.__setattr__(self, "quantizer", Float8CurrentScalingQuantizer(self.dtype))
        if self.delayed != bool(self.slot) or self.delayed == (self.quantizer is not None):
            got = f"{self.scaling!r} with slot {self.slot!r} and quantizer {self.quantizer!r}"
            wanted = "'delayed' with a slot, 'current', or another scaling with its quantizer"
            raise DTypeError(expected(wanted, of="a QuantizedType's scaling", got=got, do="give one of these"))

    @classmethod
    def of(cls, quantizer: Any) -> QuantizedType:
        """The type of what a quantizer without a state of its own gives, with the copies that it makes."""
        applied = "custom" if quantizer.custom else _APPLIED.get(quantizer.__class__)
        if applied is not None:
            return cls(DType.Byte, applied, quantizer=quantizer)
        if not hasattr(quantizer, "dtype"):
            of, do = f"custom of the quantizer {quantizer.__class__.__name__}", "let it be True: without a dtype no function of tex takes it"
            raise DTypeError(expected("True", of=of, got="False", do=do))
        made = cls(DType(int(quantizer.dtype)), scaling(quantizer), quantizer=quantizer)
        return made.read(rowwise=quantizer.rowwise_usage, columnwise=quantizer.columnwise_usage)

    def read(self, *, rowwise: bool, columnwise: bool) -> QuantizedType:
        """The type for products that read along these dimensions; itself where one copy serves both, or none is asked for."""
        if self.per_tensor or self.applied or (rowwise, columnwise) in ((False, False), (self.rowwise, self.columnwise)):
            return self
        return replace(self, rowwise=rowwise, columnwise=columnwise)

    @cached_property
    def scheme(self) -> Scheme | None:
        """The scheme by which tex scales to it; None where no backend of tex has one."""
        return scheme_named(self.scaling)

    @cached_property
    def applied(self) -> bool:
        """Whether the quantizer itself is called, as none of tex's functions takes it. ``dtype`` says nothing then."""
        return self.scheme is None

    @cached_property
    def delayed(self) -> bool:
        """Whether the scale is known before the tensor is."""
        return self.scheme is not None and self.scheme.delayed

    @cached_property
    def per_tensor(self) -> bool:
        """Whether a tensor has one scale."""
        return self.scheme is not None and self.scheme.per_tensor

    @cached_property
    def blocks(self) -> BlockFormat | None:
        """The format of a tensor that has one scale per block."""
        return self.scheme.format if self.scheme is not None and isinstance(self.scheme.format, BlockFormat) else None

    @cached_property
    def block_formats(self) -> tuple[BlockFormat, ...]:
        """``blocks``; or of a hybrid tensor, whose copies have formats of their own, those of them that have one scale per block."""
        quantizer = self.quantizer
        parts = (quantizer.rowwise_quantizer, quantizer.columnwise_quantizer) if isinstance(quantizer, HybridQuantizer) else ()
        schemes = [part._SCHEME for part in parts] if parts else [self.scheme]
        return tuple([scheme.format for scheme in schemes if scheme is not None and isinstance(scheme.format, BlockFormat)])

    @property
    def copies_differ(self) -> bool:
        """Whether the copies by rows and by columns are quantized apart, and so stand for other values."""
        return self.blocks is not None or isinstance(self.quantizer, HybridQuantizer)

    @property
    def by_rows_alone(self) -> bool:
        """Whether there is no copy for products that read along columns, but values of which one could be made."""
        return self.rowwise and not self.columnwise and self.copies_differ

    @cached_property
    def descriptor(self) -> Quantizer:
        """The quantizer that tex takes, for any scaling but delayed: the template, set to give bare storages with the copies of this type."""
        assert self.quantizer is not None
        descriptor = self.quantizer.copy()
        descriptor.internal = True
        if not self.applied:
            descriptor.set_usage(rowwise=self.rowwise, columnwise=self.columnwise)
        return descriptor

    @cached_property
    def _hash(self) -> int:
        return hash((self.dtype, self.scaling, self.slot, self.quantizer, self.rowwise, self.columnwise))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if self.applied:
            return type(self.quantizer).__name__
        ways = "" if self.rowwise and not self.columnwise else ", by columns" if not self.rowwise else ", both ways"
        return f"{self.dtype}[{self.slot or self.scaling}{ways}]"


_APPLIED: dict[type, str] = {HybridQuantizer: "hybrid", IdentityQuantizer: "identity"}

Type: TypeAlias = DType | QuantizedType
"""What a tensor can be asked for: an element type, or one with its scaling. A bare 8-bit ``DType`` asks for current scaling."""


def element(type: Type) -> DType:
    """The element type of a type."""
    return type.dtype if isinstance(type, QuantizedType) else type


def accumulator(type: Type) -> DType:
    """The type in which sums and statistics of tensors of ``type`` are computed: fp32, or fp64 for fp64."""
    return DType.Float64 if type is DType.Float64 else DType.Float32


def is_quantized_type(type: Type | None) -> TypeGuard[Type]:
    """Whether tensors of ``type`` are floats of 8 or 4 bits with a scale; those of None, any type, need not be."""
    return type.__class__ is QuantizedType or type in _FP8


def is_fp8(of: object) -> bool:
    """Whether a type, or a tensor with a ``dtype``, is 8-bit floating point."""
    dtype = element(getattr(of, "dtype", of))  # type: ignore[arg-type]
    return isinstance(dtype, DType) and dtype in _FP8


def bit_width(dtype: DType) -> int:
    """Bits per element."""
    return _FORMS[dtype][1]


def dtype_name(dtype: DType) -> str:
    """The name of an element type: ``"BFloat16"``."""
    return dtype.name
