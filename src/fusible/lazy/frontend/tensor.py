"""The lazy tensor: recording operations, and evaluating what was recorded when a value is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fusible.errors import ArgumentError, DTypeError, ShapeError, check_text, expected
from fusible.lazy import dtypes
from fusible.lazy.device import DEFAULT, device
from fusible.lazy.dims import plain, product
from fusible.lazy.dtypes import dtype
from fusible.lazy.engine.host import Array, aligned, from_dlpack, pointer
from fusible.lazy.engine.output import Output
from fusible.lazy.evaluation import executor
from fusible.lazy.frontend.registry import TensorMeta
from fusible.lazy.locate import shows_user
from fusible.lazy.logger import logger
from fusible.lazy.printing import Shape
from fusible.lazy.source import SourceInfo, source_infos, user_line
from fusible.lazy.trace.op import TraceOp
from fusible.lazy.trace.storage import Storage
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["Tensor", "record", "record_all", "stored"]


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
        self.trace_tensor = stored(_host(data, dtype), _place(device), name)

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
                return dimension.sized(shape)
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
        """What errors and printed programs call it, where that was given or assigned."""
        return self.trace_tensor.name

    @name.setter
    @shows_user
    def name(self, name: str | None) -> None:
        check_text(name, "name of Tensor", optional=True)
        self.trace_tensor.name = name

    @property
    def stack_info(self) -> list[SourceInfo]:
        """Where it was recorded: the innermost place of the user's program, looked up when it is asked for; none where that is not known."""
        return source_infos(self.trace_tensor.source)

    @property
    def size(self) -> int:
        """The number of elements."""
        return dimension.wrapped(product(self.trace_tensor.shape))

    @property
    def device(self) -> device:
        return self.trace_tensor.device

    @shows_user
    def assign_(self, value: Tensor) -> Tensor:
        """Make this handle stand for ``value``, of the same shape and dtype, and return it: the functional form of an in-place write.

        No recorded value changes: what was computed from the tensor before keeps the former value, and so does every other handle to it. Raises
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
        executor.settle(self.trace_tensor)
        return self

    @shows_user
    def numpy(self) -> Array:
        """The value as a numpy array (bfloat16 and float8 by ``ml_dtypes``). It shares the tensor's memory: do not write to it."""
        return executor.evaluate(self.trace_tensor)

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


def _place(given: Any) -> device:
    if given is not None and not isinstance(given, device):
        raise DTypeError(expected("a device or None", of="device of Tensor", got=type(given).__qualname__, do='pass fusible.lazy.device("cpu")'))
    return DEFAULT if given is None else given


def _plain(value: Any) -> Any:
    """``value`` in a dtype whose elements are Python numbers: bfloat16, float8 and int4 widened exactly."""
    if value.dtype == dtypes.int4.numpy:
        return value.astype(np.int8)
    return value.astype(np.float32) if value.dtype.itemsize < 4 and value.dtype.kind in "Vf" else value


def record(op: TraceOp, *tensors: Tensor) -> Tensor:
    """Record ``op`` on ``tensors`` and return its output.

    Raises ``ShapeError`` or ``DTypeError`` where the operands are illegal, and ``ArgumentError`` where they live on two devices.
    """
    inputs = tuple([t.trace_tensor for t in tensors])
    shape, of = op.infer(*inputs)
    for n in shape:
        if type(n) is not int:
            shape = plain(shape)
            break
    place = inputs[0].device if inputs else DEFAULT
    for t in inputs:
        if t.device is not place:
            place = _one_device(op, inputs)
    output = TraceTensor(shape, of, op.place(place), op, user_line())
    op.bind(inputs, (output,))
    tensor = _new(Tensor)
    tensor.trace_tensor = output
    return tensor


def record_all(op: TraceOp, *tensors: Tensor) -> list[Tensor]:
    """``record`` of an operation with any number of outputs. They are evaluated together."""
    inputs = tuple([t.trace_tensor for t in tensors])
    types = op.infer_all(*inputs)
    place = inputs[0].device if inputs else DEFAULT
    if any(t.device is not place for t in inputs):
        place = _one_device(op, inputs)
    source = user_line()
    outputs = tuple([TraceTensor(shape, of, op.place(place), op, source) for shape, of in types])
    op.bind(inputs, outputs)
    return [Tensor.from_trace_tensor(output) for output in outputs]


def _one_device(op: TraceOp, inputs: tuple[TraceTensor, ...]) -> device:
    """The device of the operands that live somewhere: what is computed from literals alone (``ones``, ``iota``) is made where it is needed."""
    placed = [t for t in inputs if _is_placed(t)]
    if any(t.device is not placed[0].device for t in placed):
        got = " and ".join(f"{t} on {t.device}" for t in placed)
        of = f"the operands of {type(op).__name__.lower()}"
        raise ArgumentError(expected("one device", of=of, got=got, do="copy one of them to the other's device"))
    return placed[0].device if placed else DEFAULT


def _is_placed(tensor: TraceTensor) -> bool:
    """Whether the value depends on stored data, an argument or an explicit copy."""
    seen: set[int] = set()
    stack = [tensor]
    while stack:
        producer = stack.pop().producer
        if producer.is_input or producer.places:
            return True
        if id(producer) not in seen:
            seen.add(id(producer))
            stack.extend(producer.inputs)
    return False


def stored(array: Array, place: device = DEFAULT, name: str | None = None) -> TraceTensor:
    """A stored value: ``array`` itself, which is contiguous and aligned."""
    op = Storage(array.shape, dtypes.from_numpy(array.dtype), array)
    tensor = TraceTensor(op.shape, op.dtype, place, op, user_line())
    tensor.name = name
    op.bind((), (tensor,))
    return tensor


_PYTHON = {"f": dtypes.float32, "i": dtypes.int32, "b": dtypes.bool}


def _host(data: Any, of: dtype | None) -> Array:
    """The contiguous, aligned host array of ``data``, converted to ``of`` where that is given."""
    if of is not None:
        dtypes.check_dtype(of)
    if isinstance(data, np.ndarray | np.generic):
        array = np.asarray(data)
        dtypes.from_numpy(array.dtype)
        return aligned(array if of is None else array.astype(of.numpy))
    if hasattr(data, "__dlpack__"):
        array = from_dlpack(data)
        if of is not None and array.dtype != of.numpy:
            return aligned(array.astype(of.numpy))
        return aligned(array) if pointer(array) % 64 else array
    try:
        array = np.array(data)
    except ValueError as error:
        raise ArgumentError(expected("equal lengths", of="nested lists", got=str(error).split(".")[0], do="pad or split the data")) from error
    kind = _PYTHON.get(array.dtype.kind)
    if kind is None:
        raise ArgumentError(
            expected(
                "numbers, lists of numbers, a numpy array or an object with __dlpack__", of="tensor data", got=type(data).__name__, do="convert it"
            )
        )
    target = of or kind
    if array.dtype.kind == "i" and target.is_integer and array.size and not target.min <= array.min() <= array.max() <= target.max:
        raise ArgumentError(expected(f"integers that fit {target}", of="tensor data", got=f"a value up to {array.max()}", do="pass a wider dtype"))
    with np.errstate(over="ignore"):
        return aligned(array.astype(target.numpy))


from fusible.lazy.frontend import dimension  # noqa: E402 - last: a size is a tensor
