"""The lazy tensor, which is evaluated when its value is needed; and the size of a dynamic dimension, a tensor that shapes may be made of."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fusible.errors import ArgumentError, DTypeError, ShapeError, check_text, expected
from fusible.lazy import dims, dtypes
from fusible.lazy.device import DEFAULT, device
from fusible.lazy.dims import Size, SizeLike, bounds, size_of, unknown
from fusible.lazy.dtypes import dtype
from fusible.lazy.engine.host import Array
from fusible.lazy.engine.output import Output
from fusible.lazy.evaluation import executor
from fusible.lazy.frontend.data import host_array, stored
from fusible.lazy.frontend.registry import TensorMeta
from fusible.lazy.locate import shows_user
from fusible.lazy.logger import logger
from fusible.lazy.printing import Shape
from fusible.lazy.source import SourceInfo, source_infos, user_line
from fusible.lazy.trace import DimensionValue, TraceTensor

__all__ = ["DimensionSize", "Tensor", "sized", "wrapped"]

_PRINTED_EARLY = (
    "A tensor is printed while the function that computes it is compiled: it has no value yet, and calls of the executable print nothing. "
    "Return it from the function to see its value."
)


class Tensor(metaclass=TensorMeta):
    """A tensor that records what is done to it, and computes when its value is used.

    ``Tensor(data)`` takes Python numbers, (nested) lists of them, numpy arrays, or anything on the host with ``__dlpack__``. Numbers and
    lists become float32, int32 or bool, or ``dtype``. numpy data is copied; the memory of a DLPack exporter is shared where it is
    contiguous and aligned to 64 bytes, and copied otherwise: do not write to it while the tensor is in use. ``device`` is where it lives, by
    default ``gpu:0``, the logical accelerator; ``name`` is what errors call it; no two need differ.

    A value is used by ``eval()``, ``numpy()``, ``tolist()``, ``item()``, ``repr``, ``bool()``, ``int()``, ``float()`` and DLPack export.
    From then on the tensor is stored, and is computed no more. ``shape``, ``dtype``, ``ndim``, ``size`` and ``device`` are known without
    evaluation. Most functions of ``fusible.lazy`` are methods as well.
    """

    __slots__ = ("__weakref__", "trace_tensor")
    __array_priority__ = 10000
    __array_ufunc__ = None
    __iter__: None = None
    __hash__ = object.__hash__

    trace_tensor: TraceTensor
    if TYPE_CHECKING:
        __getattr__: Callable[..., Any]
        __add__: Callable[[Any], Tensor]
        __radd__: Callable[[Any], Tensor]
        __sub__: Callable[[Any], Tensor]
        __rsub__: Callable[[Any], Tensor]
        __mul__: Callable[[Any], Tensor]
        __rmul__: Callable[[Any], Tensor]
        __truediv__: Callable[[Any], Tensor]
        __rtruediv__: Callable[[Any], Tensor]
        __floordiv__: Callable[[Any], Tensor]
        __rfloordiv__: Callable[[Any], Tensor]
        __mod__: Callable[[Any], Tensor]
        __rmod__: Callable[[Any], Tensor]
        __pow__: Callable[[Any], Tensor]
        __matmul__: Callable[[Any], Tensor]
        __and__: Callable[[Any], Tensor]
        __or__: Callable[[Any], Tensor]
        __xor__: Callable[[Any], Tensor]
        __lshift__: Callable[[Any], Tensor]

        def __eq__(self, other: object) -> Tensor: ...  # type: ignore[override]
        def __ne__(self, other: object) -> Tensor: ...  # type: ignore[override]

        __lt__: Callable[[Any], Tensor]
        __le__: Callable[[Any], Tensor]
        __gt__: Callable[[Any], Tensor]
        __ge__: Callable[[Any], Tensor]
        __abs__: Callable[[], Tensor]
        __neg__: Callable[[], Tensor]
        __invert__: Callable[[], Tensor]
        __getitem__: Callable[[Any], Tensor]

    @shows_user
    def __init__(self, data: Any, dtype: dtype | None = None, device: device | None = None, name: str | None = None) -> None:
        check_text(name, "name of Tensor", optional=True)
        self.trace_tensor = stored(host_array(data, dtype), _place(device), name)

    @classmethod
    def from_trace_tensor(cls, trace_tensor: TraceTensor) -> Tensor:
        """The lazy tensor of a recorded value."""
        self = _new(cls)
        self.trace_tensor = trace_tensor
        return self

    @property
    def shape(self) -> Shape:
        """The sizes: ints, and a ``DimensionSize`` for each that a call of a function being compiled determines."""
        shape = self.trace_tensor.shape
        for n in shape:
            if type(n) is not int:
                return sized(shape)
        return shape

    @property
    def dtype(self) -> dtype:
        return self.trace_tensor.dtype

    @property
    def ndim(self) -> int:
        return len(self.trace_tensor.shape)

    @property
    def rank(self) -> int:
        """The number of dimensions, ``ndim``."""
        return len(self.trace_tensor.shape)

    @property
    def name(self) -> str | None:
        """The name that errors and printed programs use, where one was given or assigned."""
        return self.trace_tensor.name

    @name.setter
    @shows_user
    def name(self, name: str | None) -> None:
        check_text(name, "name of Tensor", optional=True)
        self.trace_tensor.name = name

    @property
    def stack_info(self) -> list[SourceInfo]:
        """Where the tensor was recorded: the innermost place of the user's program, in a list; an empty list where that is not known."""
        return source_infos(self.trace_tensor.source)

    @property
    def size(self) -> int:
        """The number of elements."""
        return wrapped(dims.product(self.trace_tensor.shape))

    @property
    def device(self) -> device:
        return self.trace_tensor.device

    @shows_user
    def assign_(self, value: Tensor) -> Tensor:
        """Let this object stand for ``value``, of the same shape and dtype, and return it: the functional form of an in-place write.

        No recorded value changes: tensors that were computed from this one before keep the former value, and so do other objects for it. Raises
        ``ShapeError`` or ``DTypeError`` for another shape or dtype.
        """
        if value.shape != self.shape:
            raise ShapeError(expected(f"shape {self.shape}", of="a value to assign", got=value.shape, do="reshape it first"))
        if value.dtype is not self.dtype:
            raise DTypeError(expected(f"{self.dtype}", of="a value to assign", got=value.dtype, do="cast it first"))
        self.trace_tensor = value.trace_tensor
        return self

    @shows_user
    def eval(self) -> Tensor:
        """Compute the value now, and return ``self``, which is stored from then on.

        Raises ``CompileError`` where the value depends on an argument of a function that is being compiled.
        """
        executor.materialize(self.trace_tensor)
        return self

    @shows_user
    def numpy(self) -> Array:
        """The value as a numpy array (bfloat16 and float8 by ``ml_dtypes``). It shares the tensor's memory: do not write to it."""
        return executor.evaluate(self.trace_tensor)

    def __copy__(self) -> Tensor:
        return type(self).from_trace_tensor(self.trace_tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if executor.awaits_call(self.trace_tensor):  # there is no value yet, and none is made of what is recorded but by a call
            return self.__copy__()
        make, arguments = self.__reduce__()
        return make(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle holds the value, and not how it came about."""
        return Tensor, (self.numpy(), self.dtype, self.device, self.name)

    @shows_user
    def tolist(self) -> Any:
        """The value as nested lists of Python numbers."""
        return _plain(self.numpy()).tolist()

    @shows_user
    def __repr__(self) -> str:
        recorded = self.trace_tensor
        if executor.awaits_call(recorded):
            logger.warning(_PRINTED_EARLY, mode="once")
            sizes = ", ".join(map(str, recorded.shape)) + ("," if self.ndim == 1 else "")
            return f"tensor(<what a call gives>, dtype={self.dtype}, loc={self.device.found}, shape=({sizes}))"
        if self.dtype is dtypes.int4:
            raise DTypeError(expected("a dtype that prints", of="repr()", got="a tensor of int4", do="dequantize it, or cast it to int8 first"))
        values = np.array2string(self.numpy(), separator=", ", prefix="tensor(")
        return f"tensor({values}, dtype={self.dtype}, loc={self.device.found}, shape={self.shape})"

    @shows_user
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    @shows_user
    def __dlpack__(self, stream: Any = None, **options: Any) -> Any:
        return Output(self.numpy()).__dlpack__(stream=stream, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    @shows_user
    def __len__(self) -> int:
        if not self.shape:
            raise ArgumentError(expected("at least one dimension", of="len()", got="a tensor of shape ()", do="use its size"))
        return self.shape[0]

    def _item(self, what: str) -> Any:
        if self.size != 1:
            raise ArgumentError(expected("exactly one element", of=f"{what}()", got=f"a tensor of shape {self.shape}", do="reduce or index it first"))
        return self.numpy().reshape(())

    @shows_user
    def item(self) -> Any:
        """The only element as a Python number; raises ``ArgumentError`` where there are more or none."""
        return _plain(self._item("item")).item()

    @shows_user
    def __bool__(self) -> bool:
        return bool(self._item("bool"))

    @shows_user
    def __int__(self) -> int:
        return int(self._item("int"))

    @shows_user
    def __float__(self) -> float:
        return float(self._item("float"))

    @shows_user
    def __index__(self) -> int:
        if not self.dtype.is_integer:
            raise TypeError(expected("an integer tensor", of="an index", got=str(self.dtype), do="cast it first"))
        return int(self._item("index"))


_new = object.__new__


def _place(place: Any) -> device:
    if place is not None and not isinstance(place, device):
        raise DTypeError(expected("a device or None", of="device of Tensor", got=type(place).__qualname__, do='pass fusible.lazy.device("cpu")'))
    return DEFAULT if place is None else place


def _plain(value: Any) -> Any:
    """``value`` in a dtype whose elements convert to Python numbers: bfloat16, float8 and int4 are widened, exactly."""
    if value.dtype == dtypes.int4.numpy:
        return value.astype(np.int8)
    return value.astype(np.float32) if value.dtype.itemsize < 4 and value.dtype.kind in "Vf" else value


def _symbolic(name: str, compute: Callable[[Any, Any], Any]) -> Any:
    """An operator that gives a size where the other operand is one, and is the operator of ``Tensor`` otherwise."""

    def call(self: DimensionSize, other: Any) -> Any:
        size = size_of(other)
        return getattr(Tensor, name)(self, other) if size is None else wrapped(compute(self.expression, size))

    return call


def _compared(name: str, decided: Callable[[int, int], bool | None]) -> Any:
    """A comparison: a truth value where the bounds of the sizes decide it, else a tensor. ``decided`` is called with the bounds of the difference."""

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

    def __copy__(self) -> DimensionSize:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DimensionSize:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (DimensionSize, (self.expression,)) if isinstance(self.expression, int) else super().__reduce__()

    @property
    def trace_tensor(self) -> TraceTensor:  # type: ignore[override] - recorded where it is first used as a tensor
        if self._recorded is None:
            self._recorded = DimensionValue(self.expression, dtypes.int32).output(DEFAULT, user_line())
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
    """A size for users: an int, or a ``DimensionSize``."""
    return DimensionSize(size) if isinstance(size, Size) else size


def sized(shape: Shape) -> Shape:
    """A shape for users, of ints and ``DimensionSize``."""
    return tuple([wrapped(n) for n in shape])
