"""Compiling a function of lazy tensors ahead of its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.lazy.device import DEFAULT
from fusible.lazy.dtypes import BY_NUMPY, check_dtype, dtype
from fusible.lazy.flat_ir.flat_ir import FlatIR
from fusible.lazy.frontend.arguments import as_shape
from fusible.lazy.frontend.tensor import Tensor
from fusible.lazy.printing import Shape
from fusible.lazy.runtime.executor import program_of
from fusible.lazy.runtime.host import Array, read
from fusible.lazy.runtime.output import Output
from fusible.lazy.source import user_line
from fusible.lazy.stablehlo.module import StableHLO
from fusible.lazy.trace.ops.storage import Input
from fusible.lazy.trace.tensor import TraceTensor
from fusible.lazy.trace.trace import Trace

__all__ = ["Executable", "InputInfo", "compile"]


@dataclass(frozen=True)
class InputInfo:
    """The shape and dtype of a runtime input of a compiled function."""

    shape: Shape
    dtype: dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", as_shape(self.shape))
        check_dtype(self.dtype)


class Executable:
    """A compiled function. Calling it takes its runtime inputs in order, and returns a flat list of ``Output``.

    An input is a lazy tensor, a numpy array or anything on the host with ``__dlpack__``. Its memory is read in place where it is contiguous
    and aligned to 64 bytes, and copied otherwise. A call is synchronous: when it returns, the outputs are ready and no input is
    read any more, so that a caller may write to its inputs at once. Calls may come from several threads.

    ``trace``, ``flat_ir`` (before passes) and ``stablehlo`` (of ``flat_ir``) print the program; ``input_infos`` and ``output_infos`` list its types.
    """

    def __init__(self, trace: Trace, name: str) -> None:
        self.name = name
        self.trace = trace
        self.input_infos = [InputInfo(t.shape, t.dtype) for t in trace.inputs]
        self.output_infos = [InputInfo(t.shape, t.dtype) for t in trace.outputs]
        self._program = program_of(trace)
        self._checks = [(t.dtype.numpy, t.shape) for t in trace.inputs]
        first = len(self._checks)
        self._constants = [self._program.put(first + i, op.data) for i, op in enumerate(trace.storages)]

    @property
    def flat_ir(self) -> FlatIR:
        return self.trace.to_flat_ir()

    @property
    def stablehlo(self) -> StableHLO:
        return self.flat_ir.to_stablehlo()

    def __repr__(self) -> str:
        return f"Executable({self.name}, inputs={len(self.input_infos)}, outputs={len(self.output_infos)})"

    def __call__(self, *inputs: Any) -> list[Output]:
        """Run on ``inputs``; raises ``ArgumentError``, ``DTypeError`` or ``ShapeError`` for a wrong input before anything runs."""
        if len(inputs) != len(self._checks):
            raise ArgumentError(
                expected(f"{len(self._checks)} inputs", of=f"the executable {self.name}", got=len(inputs), do="pass one per InputInfo")
            )
        arrays = [self._read(i, given) for i, given in enumerate(inputs)]
        put = self._program.put
        buffers = [put(i, array) for i, array in enumerate(arrays)]
        return [Output(array) for array in self._program.run(buffers + self._constants)]

    def _read(self, index: int, given: Any) -> Array:
        of, shape = self._checks[index]
        array = given.numpy() if isinstance(given, Tensor | Output) else read(given, of)
        if array.dtype != of:
            raise DTypeError(
                expected(f"dtype {BY_NUMPY[of]}", of=f"input {index} of the executable {self.name}", got=BY_NUMPY[array.dtype], do="cast it first")
            )
        if array.shape != shape:
            raise ShapeError(
                expected(
                    f"shape {shape}", of=f"input {index} of the executable {self.name}", got=array.shape, do="reshape it, or compile for that shape"
                )
            )
        return array


def compile(func: Callable[..., Any], *, args: Sequence[Any] = ()) -> Executable:
    """Trace ``func`` once on ``args`` and compile what it records.

    Every ``InputInfo`` in ``args`` becomes a runtime input, in order; other arguments are passed as they are. Tensors among them, or
    captured by ``func``, are constants of the executable, read from their memory at every call. ``func`` returns a lazy tensor, or nested
    lists and tuples of them; the executable returns them flat, in order. Raises ``ArgumentError`` for another return value, and
    ``CompileError`` where ``func`` uses the value of an argument.
    """
    tracers: list[Tensor] = []
    given: list[Any] = []
    for argument in args:
        if isinstance(argument, InputInfo):
            op = Input(len(tracers), argument.shape, argument.dtype)
            tensor = TraceTensor(op.shape, op.dtype, DEFAULT, op, user_line())
            op.bind((), (tensor,))
            argument = Tensor.from_trace_tensor(tensor)
            tracers.append(argument)
        given.append(argument)
    outputs: list[Tensor] = []
    name = getattr(func, "__qualname__", type(func).__name__)
    _flatten(func(*given), outputs, name)
    if not outputs:
        raise ArgumentError(expected("at least one tensor", of=f"the return value of {name}", got="none", do="return what it computes"))
    return Executable(Trace(outputs, tracers), name)


def _flatten(value: Any, into: list[Tensor], name: str) -> None:
    if isinstance(value, Tensor):
        into.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _flatten(item, into, name)
    else:
        raise ArgumentError(
            expected(
                "a lazy tensor, or nested lists and tuples of them", of=f"the return value of {name}", got=type(value).__name__, do="return tensors"
            )
        )
