"""Checks of what a call passes, prepared when the function is compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.lazy import dtypes
from fusible.lazy.compilation.input_info import DimensionInputInfo, NamedDimension
from fusible.lazy.compilation.signature import Signature
from fusible.lazy.device import DEFAULT
from fusible.lazy.dims import Size, SizeLike, Symbol, size_of, symbol
from fusible.lazy.dtypes import BY_NUMPY, dtype
from fusible.lazy.engine import pjrt
from fusible.lazy.engine.host import Array, read
from fusible.lazy.engine.output import Output
from fusible.lazy.evaluation import executor
from fusible.lazy.frontend import Tensor
from fusible.lazy.printing import Shape
from fusible.lazy.trace import Storage

__all__ = ["ArgumentCheck", "SizeCheck", "TensorCheck", "checks_of"]


class TensorCheck:
    """The check of one tensor input. ``shape`` has its sizes, ``dynamic`` the dimensions whose size a call determines."""

    def __init__(self, name: str, function: str, shape: tuple[SizeLike, ...], of: dtype, donate: bool = False) -> None:
        self.of = f"{name} of the executable {function}"
        self.shape = shape
        self.dtype = of
        self.numpy = of.numpy
        self.donate = donate
        self.dynamic: list[tuple[int, Symbol]] = [(d, symbol_of(n)) for d, n in enumerate(shape) if isinstance(n, Size)]
        self.origins = [(found, f"dimension {d} of {name}") for d, found in self.dynamic]

    def admit(self, value: Any, sizes: list[int]) -> Any:
        """The engine's buffer of ``value``, or the ``Storage`` itself where it is donated. Appends the sizes of its dynamic dimensions to
        ``sizes``."""
        if isinstance(value, Tensor):
            tensor = value.trace_tensor
            if tensor.device is not DEFAULT:
                do = f'pass copy(tensor, device("{DEFAULT}"))'
                raise ArgumentError(expected(f"a tensor on {DEFAULT}", of=self.of, got=f"one on {tensor.device}", do=do))
            self.check(tensor.dtype, tensor.shape, sizes)
            storage = executor.materialize(tensor)
            return storage if self.donate else storage.placed()
        array = self.read(value, sizes, strided=False)
        return Storage(array.shape, self.dtype, array) if self.donate else pjrt.place(array, self.dtype)

    def read(self, value: Any, sizes: list[int], strided: bool = True) -> Array:
        """The host array of ``value``, checked. Appends the sizes of its dynamic dimensions to ``sizes``."""
        array = value.numpy() if isinstance(value, Tensor | Output) else read(value, self.numpy, strided, self.of)
        if array.dtype != self.numpy or array.shape != self.shape:
            self.check(BY_NUMPY[array.dtype], array.shape, sizes)
        return array

    def check(self, of: dtype, shape: Shape, sizes: list[int]) -> None:
        if of is not self.dtype:
            raise DTypeError(expected(f"dtype {self.dtype}", of=self.of, got=of, do="cast it first"))
        if shape == self.shape:
            return
        if len(shape) != len(self.shape) or any(type(n) is int and n != size for n, size in zip(self.shape, shape, strict=True)):
            spelled = f"({', '.join(map(str, self.shape))}{',' if len(self.shape) == 1 else ''})"
            raise ShapeError(expected(f"shape {spelled}", of=self.of, got=shape, do="reshape it, or compile for that shape"))
        for d, found in self.dynamic:
            n = shape[d]
            if not found.min <= n <= found.max:
                wanted = f"a size from {found.min} to {found.max}"
                raise ShapeError(expected(wanted, of=f"dimension {d} of {self.of}", got=n, do="pass one within, or compile for wider bounds"))
            sizes.append(n)


class SizeCheck:
    """The check of one input that is a size."""

    donate = False
    shape = ()
    dtype = dtypes.int32

    def __init__(self, name: str, function: str, size: SizeLike) -> None:
        self.of = f"{name} of the executable {function}"
        self.size = size
        self.origins = [(symbol_of(size), f"the size {name}")] if isinstance(size, Size) else []

    def admit(self, value: Any, sizes: list[int]) -> Any:
        return pjrt.place(self.read(value, sizes), dtypes.int32)

    def read(self, number: Any, sizes: list[int], strided: bool = True) -> Array:
        """The value as a scalar array, checked; appends it to ``sizes``."""
        value = size_of(number)
        if type(value) is not int:
            raise DTypeError(expected("an int or a DimensionSize with a value", of=self.of, got=repr(number), do="pass a whole number"))
        low, high = (self.size, self.size) if not isinstance(self.size, Size) else (self.origins[0][0].min, self.origins[0][0].max)
        if not low <= value <= high:
            wanted = f"a size from {low} to {high}"
            raise ArgumentError(expected(wanted, of=self.of, got=value, do="pass one within, or compile for wider bounds"))
        if self.origins:
            sizes.append(value)
        return np.array(value, np.int32)


ArgumentCheck = TensorCheck | SizeCheck


def symbol_of(size: Size) -> Symbol:
    """The one named size that a dimension of an input is."""
    (((found,), _),) = size.terms
    assert isinstance(found, Symbol)
    return found


def checks_of(signature: Signature) -> list[ArgumentCheck]:
    """The check of each runtime input in order; raises ``ArgumentError`` where dimensions of one name have other bounds."""
    named: dict[str, NamedDimension] = {}
    made: list[ArgumentCheck] = []
    for leaf in signature.leaves:
        if isinstance(leaf.info, DimensionInputInfo):
            made.append(SizeCheck(leaf.name, signature.function, symbol(leaf.name, *leaf.info.span)))
        else:
            shape = leaf.info.sizes(leaf.name, named)
            made.append(TensorCheck(leaf.name, signature.function, shape, leaf.info.dtype, leaf.info.donate))
    return made
