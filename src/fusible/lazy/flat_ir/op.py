"""The base of every FlatIR operation, and the table of all of them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar

import numpy as np

from fusible.lazy.dtypes import dtype
from fusible.lazy.flat_ir.tensor import FlatIRTensor
from fusible.lazy.operation import Operation, attribute_names
from fusible.lazy.printing import Shape
from fusible.lazy.stablehlo.mlir import Mlir

__all__ = ["FLAT_OPS", "FlatIROp", "emit", "frozen"]

FLAT_OPS: dict[str, type[FlatIROp]] = {}
"""Every concrete FlatIR operation by its printed name."""


class FlatIROp(Operation):
    """One StableHLO operation. Constructing it binds it: it becomes the producer of its outputs.

    A subclass is a dataclass of its attributes. It names the StableHLO builder that makes it, ``class AbsOp(ElementwiseOp, hlo="abs")``, or defines
    ``to_mlir``. ``label`` names the trace operation that it came from, and ``origin`` counts these; both are set when it is inlined.
    """

    HIDDEN: ClassVar[frozenset[str]] = frozenset({"inputs", "label", "origin", "outputs"})

    HLO: ClassVar[str] = ""
    """The name of the builder in the StableHLO dialect, ``hlo`` of the class."""

    TYPED: ClassVar[bool] = False
    """Whether the builder takes the type of the output before the operands: MLIR does not infer it."""

    is_pure: ClassVar[bool] = True
    """Whether equal operands give equal results, without other effects. Only pure operations are merged, folded and dropped."""

    inputs: list[FlatIRTensor]
    outputs: list[FlatIRTensor]
    label: str = field(default="", init=False)
    origin: int = field(default=-1, init=False)

    def __init_subclass__(cls, hlo: str = "", typed: bool = False) -> None:
        super().__init_subclass__()
        cls.HLO, cls.TYPED = hlo or cls.HLO, typed or cls.TYPED
        FLAT_OPS[cls.__name__] = cls

    def __post_init__(self) -> None:
        self.inputs = list(self.inputs)
        self.outputs = list(self.outputs)
        for out in self.outputs:
            out.producer = self

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        """Build the StableHLO operation on ``operands`` and return its result value, or a list of them.

        By default the builder is called with the type of the output where it is ``TYPED``, the operands, and the attributes in order.
        """
        build = getattr(mlir.hlo, self.HLO)
        attributes = [mlir.attribute(getattr(self, name)) for name in attribute_names(type(self))]
        return build(mlir.type(self.outputs[0]), *operands, *attributes) if self.TYPED else build(*operands, *attributes)

    def key(self) -> tuple[object, ...]:
        """The attributes by value: operations of one class with equal keys on the same operands compute the same."""
        return tuple([frozen(getattr(self, name)) for name in attribute_names(type(self))])

    def check(self) -> str | None:
        """What is wrong with the types of operands and outputs; ``None`` where they are right."""
        return None

    def __str__(self) -> str:
        left = ", ".join(map(str, self.outputs))
        return f"{left} = {type(self).__name__}({', '.join([*(t.name for t in self.inputs), *self.attributes()])})"


def frozen(value: Any) -> object:
    """An attribute as a hashable value: floats bit for bit, lists and arrays by their elements. An object without a hash is equal to itself alone."""
    kind = type(value)
    if kind is int or kind is str:
        return value
    if kind is float:
        return struct.pack("=d", value)
    if kind is list or kind is tuple:
        return tuple([frozen(v) for v in value])
    if kind is dict:
        return tuple([(name, frozen(v)) for name, v in value.items()])
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    return value if value.__hash__ is not None else id(value)


def emit(op: type[FlatIROp], inputs: Sequence[FlatIRTensor], shape: Shape, out_dtype: dtype, reason: str, **attributes: Any) -> FlatIRTensor:
    """An intermediate tensor made by ``op``; ``reason`` completes "this tensor was introduced to ..."."""
    out = FlatIRTensor(shape, out_dtype, reason=reason)
    op(list(inputs), [out], **attributes)
    return out
