"""The base of every trace operation, and the table of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from fusible.errors import DTypeError, expected
from fusible.lazy.device import device
from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir import FlatIRTensor
from fusible.lazy.operation import Operation, attribute_names
from fusible.lazy.printing import Shape
from fusible.lazy.source import Source
from fusible.lazy.trace.tensor import TraceTensor

__all__ = ["Literal", "TRACE_OPS", "TraceOp"]

Literal = tuple[float | int | bool, dtype]
"""A number and the dtype that it has in a program."""

TRACE_OPS: dict[str, type[TraceOp]] = {}
"""Every concrete trace operation by its printed name."""


class TraceOp(Operation):
    """One operation. A subclass is a dataclass of its attributes.

    A subclass defines ``to_flat_ir(inputs, outputs)``, which constructs FlatIR operations that bind ``outputs``. Where the output does not have the
    type of the first operand, or operands may be illegal, it defines ``infer(*inputs) -> (shape, dtype)`` (``infer_all`` for several outputs).
    """

    is_input: ClassVar[bool] = False
    """Whether the operation is an input of the program (and lowers to nothing)."""

    places: ClassVar[bool] = False
    """Whether the operation itself determines the device of its output, wherever its operands are."""

    has_literals: ClassVar[bool] = False
    """Whether ``parts`` gives any literals."""

    inputs = ()
    outputs = ()

    _from_outside: ClassVar[bool] = False
    """Whether the class is none of the package's, whose attributes are known to have a hash."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._from_outside = cls.__module__.partition(".")[0] != __name__.partition(".")[0]
        TRACE_OPS[cls.__name__.lower()] = cls

    def infer(self, *inputs: TraceTensor) -> tuple[Shape, dtype]:
        """The shape and dtype of the output; raises ``ShapeError`` or ``DTypeError`` for illegal inputs.

        By default they are those of the first operand.
        """
        return inputs[0].shape, inputs[0].dtype

    def infer_all(self, *inputs: TraceTensor) -> list[tuple[Shape, dtype]]:
        """``infer`` for every output."""
        return [self.infer(*inputs)]

    def place(self, common: device) -> device:
        """The device of the output, where the operands are on the device ``common``."""
        return common

    def key(self) -> tuple[object, ...]:
        """The attributes by value: operations of one class with equal keys compute the same. Floats by their spelling (-0.0 is not 0.0)."""
        return tuple([repr(v) if type(v) is float else v for v in [getattr(self, name) for name in attribute_names(type(self))]])

    def parts(self) -> tuple[tuple[object, ...], tuple[Literal, ...]]:
        """``key`` in two parts: everything but the literals, and the literals with their dtypes.

        A literal is a number that no shape or dtype depends on. A program may read it from an input instead: ``to_flat_ir_reading`` lowers it so.
        """
        return self.key(), ()

    def to_flat_ir(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor]) -> None:
        """Construct the FlatIR operations that compute ``outputs`` from ``inputs``."""
        raise NotImplementedError

    def to_flat_ir_reading(self, inputs: Sequence[FlatIRTensor], outputs: Sequence[FlatIRTensor], literals: Mapping[int, FlatIRTensor]) -> None:
        """``to_flat_ir`` for a program that reads some literals: ``literals`` maps their positions in ``parts`` to scalar tensors."""
        raise NotImplementedError

    def bind(self, inputs: tuple[TraceTensor, ...], outputs: tuple[TraceTensor, ...]) -> None:
        """Make it the operation on ``inputs`` that gives ``outputs``. Raises ``DTypeError`` where an attribute cannot be part of a program's key."""
        if self._from_outside:
            self._check_hashes()
        self.inputs: tuple[TraceTensor, ...] = inputs
        self.outputs: tuple[TraceTensor, ...] = outputs

    def _check_hashes(self) -> None:
        named = {name: getattr(self, name) for name in attribute_names(type(self))} if type(self).key is TraceOp.key else {"key": self.key()}
        for name, value in named.items():
            if not _stays(value):
                got = f"a {type(value).__name__}" + (" of items without one" if isinstance(value, tuple) else "")
                of, do = f"{name} of the operation {type(self).__name__}", "pass numbers or tuples, and a tensor as an operand"
                raise DTypeError(expected("a value with a hash, which stays as it is", of=of, got=got, do=do))

    def output(self, device: device, source: Source, name: str | None = None) -> TraceTensor:
        """The one output of an operation without operands, which is bound to it."""
        shape, of = self.infer()
        tensor = TraceTensor(shape, of, device, self, source)
        tensor.name = name
        self.bind((), (tensor,))
        return tensor

    def describe(self, operands: Sequence[str]) -> str:
        """``unaryelementwise(t0, kind=Kind.TANH)`` for the operand names ``["t0"]``."""
        return f"{type(self).__name__.lower()}({', '.join([*operands, *self.attributes()])})"


def _stays(value: object) -> bool:
    """Whether a value can be part of a key: it has a hash, and is no memory that others may write to."""
    try:
        hash(value)
    except TypeError:
        return False
    return not hasattr(type(value), "__dlpack__")
