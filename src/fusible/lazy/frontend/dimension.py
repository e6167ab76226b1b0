"""Sizes of dynamic dimensions, as users meet them in ``x.shape``."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from fusible.errors import ArgumentError, DTypeError, expected
from fusible.lazy import dims, dtypes
from fusible.lazy.device import DEFAULT
from fusible.lazy.dims import Size, SizeLike, bounds, size_of, unknown
from fusible.lazy.dtypes import dtype
from fusible.lazy.frontend.tensor import Tensor, record
from fusible.lazy.locate import shows_user
from fusible.lazy.printing import Shape
from fusible.lazy.source import user_line
from fusible.lazy.trace.dimension import DimensionValue
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["DimensionSize", "as_value", "sized"]


def _symbolic(name: str, compute: Callable[[Any, Any], Any]) -> Any:
    """An operator that gives a size for sizes, and otherwise is that of a tensor."""

    def call(self: DimensionSize, other: Any) -> Any:
        size = size_of(other)
        return getattr(Tensor, name)(self, other) if size is None else wrapped(compute(self.expression, size))

    return call


def _compared(name: str, decided: Callable[[int, int], bool | None]) -> Any:
    """A comparison: a truth value where the bounds of the sizes decide it, else a tensor. ``decided`` is asked with the bounds of the difference."""

    def call(self: DimensionSize, other: Any) -> Any:
        size = size_of(other)
        known = None if size is None else decided(*bounds(self.expression - size))
        return getattr(Tensor, name)(self, other) if known is None else known

    return call


class DimensionSize(Tensor):
    """The size of a dynamic dimension: a scalar int32 tensor that shapes can be made of.

    Arithmetic with ints and other sizes (``+ - * / // %``, ``maximum``, ``minimum``, ``abs``, and ``**`` an int) gives a size; with tensors it is a
    tensor, which like a Python number adopts the dtype of the other operand. ``/`` gives the quotient truncated toward zero. ``==``
    between sizes tells whether they are one expression, and never depends on a call. ``<`` and the like give a truth value where the bounds
    decide, else a bool tensor. ``DimensionSize(4)`` is a size that is known.
    """

    __slots__ = ("_recorded", "expression")

    expression: SizeLike

    @shows_user
    def __init__(self, data: Any, name: str | None = None) -> None:
        found = size_of(data)
        if found is None:
            raise DTypeError(expected("a whole number", of="a DimensionSize", got=repr(data), do="pass an int or another size"))
        self.expression = found
        self._recorded: TraceTensor | None = None
        if name is not None:
            self.trace_tensor.name = name

    @property
    def trace_tensor(self) -> TraceTensor:  # type: ignore[override] - recorded where it is first used as a tensor
        if self._recorded is None:
            op = DimensionValue(self.expression, dtypes.int32)
            self._recorded = TraceTensor((), dtypes.int32, DEFAULT, op, user_line())
            op.bind((), (self._recorded,))
        return self._recorded

    @trace_tensor.setter
    def trace_tensor(self, value: TraceTensor) -> None:
        raise DTypeError(expected("no assignment", of="a size", got="one", do="make a tensor of it first, by cast or arithmetic"))

    def __repr__(self) -> str:
        return f"DimensionSize({self.expression})"

    def __str__(self) -> str:
        return str(self.expression)

    def __hash__(self) -> int:
        return hash(self.expression)

    def __eq__(self, other: object) -> Any:
        size = size_of(other)
        return Tensor.__eq__(self, other) if size is None else self.expression == size

    def __ne__(self, other: object) -> Any:
        size = size_of(other)
        return Tensor.__ne__(self, other) if size is None else self.expression != size

    __add__ = _symbolic("__add__", operator.add)
    __radd__ = _symbolic("__radd__", lambda a, b: b + a)
    __sub__ = _symbolic("__sub__", operator.sub)
    __rsub__ = _symbolic("__rsub__", lambda a, b: b - a)
    __mul__ = _symbolic("__mul__", operator.mul)
    __rmul__ = _symbolic("__rmul__", lambda a, b: b * a)
    __floordiv__ = _symbolic("__floordiv__", operator.floordiv)
    __rfloordiv__ = _symbolic("__rfloordiv__", lambda a, b: b // a)
    __truediv__ = _symbolic("__truediv__", lambda a, b: _truncated(a, b))
    __rtruediv__ = _symbolic("__rtruediv__", lambda a, b: _truncated(b, a))
    __mod__ = _symbolic("__mod__", operator.mod)
    __rmod__ = _symbolic("__rmod__", lambda a, b: b % a)
    maximum = _symbolic("maximum", dims.maximum)
    minimum = _symbolic("minimum", dims.minimum)
    __lt__ = _compared("__lt__", lambda low, high: True if high < 0 else False if low >= 0 else None)
    __le__ = _compared("__le__", lambda low, high: True if high <= 0 else False if low > 0 else None)
    __gt__ = _compared("__gt__", lambda low, high: True if low > 0 else False if high <= 0 else None)
    __ge__ = _compared("__ge__", lambda low, high: True if low >= 0 else False if high < 0 else None)

    def __neg__(self) -> Any:
        return wrapped(-self.expression)

    def __abs__(self) -> Any:
        return wrapped(dims.maximum(self.expression, -self.expression))

    def __pow__(self, other: Any) -> Any:
        times = size_of(other)
        return wrapped(dims.product([self.expression] * times)) if type(times) is int and times >= 0 else super().__pow__(other)

    @shows_user
    def __bool__(self) -> bool:
        low, high = bounds(self.expression)
        return low > 0 or high < 0 if low > 0 or high <= 0 else Tensor.__bool__(self)

    def _item(self, what: str) -> Any:
        if isinstance(self.expression, Size):
            raise unknown(f"{what}() of the size {self.expression}")
        return np.int32(self.expression)


def _truncated(a: SizeLike, b: SizeLike) -> SizeLike:
    """``a / b`` of sizes as of integers: rounded toward zero. Raises ``ArgumentError`` for a dynamic divisor that may be 0 or less, and for 0."""
    if b == 0:
        raise ArgumentError(expected("a divisor other than 0", of=f"the division of {a}", got=0, do="pass another"))
    if type(b) is int and b < 0:
        a, b = -a, -b
    if bounds(a)[0] >= 0:
        return a // b
    return dims.maximum(a, 0) // b - dims.maximum(-a, 0) // b


def wrapped(size: SizeLike) -> Any:
    """A size as users see it: an int, or a ``DimensionSize``."""
    return DimensionSize(size) if isinstance(size, Size) else size


def sized(shape: Shape) -> Shape:
    """A shape as users see it."""
    return tuple([wrapped(n) for n in shape])


def as_value(size: DimensionSize, of: dtype) -> Tensor:
    """The size as a scalar tensor of dtype ``of``, as a literal of it would be; raises as ``literal`` does where ``of`` cannot hold it."""
    low, high = bounds(size.expression)
    if of.kind == "bool":
        raise DTypeError(expected("True or False", of="a literal of dtype bool", got=repr(size), do="compare or cast it first"))
    if of.is_integer and not of.min <= low <= high <= of.max:
        wanted = f"a size from {of.min} to {of.max}"
        raise ArgumentError(expected(wanted, of=f"a value of dtype {of}", got=f"{size} from {low} to {high}", do="use a wider dtype"))
    return record(DimensionValue(size.expression, of))
