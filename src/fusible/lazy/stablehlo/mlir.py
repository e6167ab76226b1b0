"""The parts of the MLIR bindings that building a module uses: dialects, types and attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fusible.errors import CompileError, expected
from fusible.lazy.dtypes import dtype, int4
from fusible.lazy.engine import pjrt
from fusible.lazy.printing import Shape
from fusible.lazy.source import Source, place_of
from fusible.locks import Lock

__all__ = ["LOCK", "Mlir", "TensorType", "Typed", "get", "portable"]

LOCK = Lock()
"""Held while a module is built: one context serves all threads."""

_MLIR: list[Mlir] = []

_MAX_TYPES = 4096
"""Tensor types that are remembered: a process that sees new shapes for ever must not keep all of them."""


class Typed(Protocol):
    """Anything with the shape and dtype of a ranked tensor type, as every value of a FlatIR has them."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> dtype: ...


class TensorType(NamedTuple):
    """A type without a value."""

    shape: Shape
    dtype: dtype


class Mlir:
    """One MLIR context with the StableHLO dialect. ``ir``, ``hlo`` and ``func`` are the binding's modules."""

    def __init__(self) -> None:
        self.ir, self.hlo, self.func = pjrt.mlir_modules()
        self.context = pjrt.mlir_context()
        self._elements: dict[dtype, Any] = {}
        self._types: dict[tuple[Shape, dtype], Any] = {}
        self._unknown = self.ir.ShapedType.get_dynamic_size()

    def element(self, of: dtype) -> Any:
        """The MLIR type of an element type."""
        if of not in self._elements:
            self._elements[of] = self.ir.Type.parse(of.mlir, self.context)
        return self._elements[of]

    def type(self, of: Typed) -> Any:
        """The ranked tensor type of a value; ``?`` for a size that a call determines."""
        key = of.shape, of.dtype
        found = self._types.get(key)
        if found is None:
            found = self.ir.RankedTensorType.get([n if type(n) is int else self._unknown for n in of.shape], self.element(of.dtype))
            if len(self._types) < _MAX_TYPES:
                self._types[key] = found
        return found

    def location(self, name: str, source: Source) -> Any:
        """``"name"("file":line:column)``: what a diagnostic of the engine is mapped back by."""
        place = place_of(source)
        return self.ir.Location.name(name, self.ir.Location.file(place.file, place.line, place.column + 1))

    def i64(self, value: int) -> Any:
        return self.ir.IntegerAttr.get(self.ir.IntegerType.get_signless(64), value)

    def ints(self, values: Sequence[int]) -> Any:
        return self.ir.DenseI64ArrayAttr.get(list(values))

    def attribute(self, value: int | Sequence[int]) -> Any:
        """A number, or an array of numbers."""
        return self.i64(value) if isinstance(value, int) else self.ints(value)

    def attributes(self, values: Mapping[str, int]) -> Any:
        """A dictionary of 32-bit integers."""
        i32 = self.ir.IntegerType.get_signless(32)
        return self.ir.DictAttr.get({name: self.ir.IntegerAttr.get(i32, value) for name, value in values.items()})

    def pairs(self, values: Sequence[tuple[int, int]]) -> Any:
        """An ``[n, 2]`` integer attribute, as paddings are given."""
        return self.ir.DenseIntElementsAttr.get(np.array(values, np.int64).reshape(-1, 2))

    def gather_numbers(self, out: Typed, index: Typed, dim: int) -> Any:
        """How a gather of ``index`` along ``dim`` names dimensions."""
        return self.hlo.GatherDimensionNumbers.get(
            offset_dims=[d for d in range(len(out.shape)) if not dim <= d < dim + len(index.shape)],
            collapsed_slice_dims=[dim],
            operand_batching_dims=[],
            start_indices_batching_dims=[],
            start_index_map=[dim],
            index_vector_dim=len(index.shape),
        )

    def dense(self, array: np.ndarray[Any, Any], of: dtype) -> Any:
        """The literal ``array``; the bindings take the bits of floats, and of bools and int4 one attribute each."""
        kind = self.ir.RankedTensorType.get(array.shape, self.element(of))
        if of.kind == "bool" or of is int4:
            element = self.element(of)
            each = [self.ir.BoolAttr.get(n) if of.kind == "bool" else self.ir.IntegerAttr.get(element, int(n)) for n in array.ravel().tolist()]
            dense = self.ir.DenseElementsAttr
            return dense.get_splat(kind, each[0]) if array.shape == () else dense.get(each, kind)
        if of.kind in ("float", "float8"):
            array = array.view(f"u{array.itemsize}")
        return self.ir.DenseElementsAttr.get(np.ascontiguousarray(array).reshape(array.shape), type=kind)


def get() -> Mlir:
    """The process's context, made on first use."""
    with LOCK:
        if not _MLIR:
            _MLIR.append(Mlir())
        return _MLIR[0]


_TO_STABLEHLO = "builtin.module(func.func(chlo-legalize-to-stablehlo,shape-legalize-to-stablehlo,canonicalize))"
"""Operations of CHLO, StableHLO's library of functions, become what they consist of: a portable artifact has none. The last pass removes casts."""


def portable(bytecode: bytes) -> bytes:
    """The portable artifact of a module's bytecode, in the version that readers of the last 12 weeks have.

    The bindings turn the module that they are given into one, so it is read afresh. Raises ``CompileError`` for an operation that no artifact has.
    """
    with LOCK:
        mlir = get()
        said: list[str] = []
        heard = mlir.context.attach_diagnostic_handler(lambda diagnostic: said.append(str(diagnostic)) is None)
        try:
            with mlir.context:
                module = mlir.ir.Module.parse(bytecode)
                if b"chlo" in bytecode:
                    pjrt.pass_manager().parse(_TO_STABLEHLO).run(module.operation)
                version = mlir.hlo.get_version_from_compatibility_requirement(mlir.hlo.StablehloCompatibilityRequirement.WEEK_12)
                return mlir.hlo.serialize_portable_artifact(module, version)
        except (mlir.ir.MLIRError, ValueError) as error:
            reason, do = " ".join((said or [str(error)])[0].split()), "lower what it says to operations of StableHLO"
            raise CompileError(expected("operations that StableHLO has", of="a portable program", got=reason, do=do)) from error
        finally:
            heard.detach()
