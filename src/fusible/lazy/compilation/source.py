"""The sources of an executable's programs: a trace in this process, or a saved module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fusible.errors import ArgumentError, expected
from fusible.lazy.dims import Symbol, concrete
from fusible.lazy.dtypes import dtype
from fusible.lazy.engine.engine import Program
from fusible.lazy.engine.engines import current_engine
from fusible.lazy.evaluation.executor import program_of
from fusible.lazy.flat_ir import FlatIR
from fusible.lazy.flat_ir.passes import DEFAULT_PASSES
from fusible.lazy.printing import Shape
from fusible.lazy.stablehlo.module import StableHLO
from fusible.lazy.stablehlo.portable import check_types, read_portable, refined
from fusible.lazy.trace import Storage, Trace, specialize

__all__ = ["ModuleSource", "Source", "TraceSource"]


class Source(Protocol):
    """Makes the program for given sizes. ``storages`` are the constants: inputs of every program, after the runtime ones."""

    @property
    def level(self) -> int: ...

    @property
    def storages(self) -> Sequence[Storage]: ...

    def program(self, values: Mapping[Symbol, int]) -> Program: ...

    @property
    def trace(self) -> Trace: ...

    @property
    def flat_ir(self) -> FlatIR: ...

    def optimized(self, values: Mapping[Symbol, int]) -> FlatIR:
        """The program for given sizes after the passes."""
        ...

    @property
    def stablehlo(self) -> StableHLO: ...

    def module(self) -> StableHLO:
        """The module that a file holds."""
        ...


class TraceSource:
    """A recorded function. For given sizes the trace is specialized and lowered; the user's function does not run again."""

    def __init__(self, trace: Trace, level: int, aliases: Mapping[int, int]) -> None:
        self.trace = trace
        self.level = level
        self.aliases = aliases
        self.storages = trace.storages

    def program(self, values: Mapping[Symbol, int]) -> Program:
        return program_of(self._at(values), self.level, self.aliases)

    def _at(self, values: Mapping[Symbol, int]) -> Trace:
        return specialize(self.trace, values) if values else self.trace

    def optimized(self, values: Mapping[Symbol, int]) -> FlatIR:
        return self._at(values).to_flat_ir().run(*DEFAULT_PASSES)

    @property
    def flat_ir(self) -> FlatIR:
        return self.trace.to_flat_ir()

    @property
    def stablehlo(self) -> StableHLO:
        return self.flat_ir.to_stablehlo(self.aliases)

    def module(self) -> StableHLO:
        return self.flat_ir.run(*DEFAULT_PASSES).to_stablehlo(self.aliases)


class ModuleSource:
    """A saved module. ``inputs`` and ``outputs`` are its types, with symbolic sizes; ``sizes`` names the inputs whose value is a size.

    ``binary`` is its compiled form for ``binary_values``, where the file holds one that is trusted and fits this machine.
    """

    def __init__(
        self,
        portable: bytes,
        inputs: Sequence[tuple[Shape, dtype]],
        outputs: Sequence[tuple[Shape, dtype]],
        sizes: Mapping[int, Symbol],
        storages: Sequence[Storage],
        level: int,
    ) -> None:
        self.portable = portable
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.sizes = sizes
        self.storages = storages
        self.level = level
        check_types(read_portable(portable), inputs, outputs)
        self.binary: tuple[Mapping[Symbol, int], bytes] | None = None

    def program(self, values: Mapping[Symbol, int]) -> Program:
        inputs, outputs = ([(concrete(shape, values), of) for shape, of in types] for types in (self.inputs, self.outputs))
        if self.binary is not None and self.binary[0] == values:
            return current_engine().load(self.binary[1], inputs, outputs)
        module = read_portable(self.portable)
        if values:
            refined(module, inputs, {i: values[symbol] for i, symbol in self.sizes.items()})
        check_types(module, inputs, outputs)
        engine = current_engine()
        return engine.compile(getattr(module, engine.ARTIFACT), inputs, outputs, self.level)

    @property
    def trace(self) -> Trace:
        raise _not_saved("a trace")

    @property
    def flat_ir(self) -> FlatIR:
        raise _not_saved("a FlatIR")

    def optimized(self, values: Mapping[Symbol, int]) -> FlatIR:
        raise _not_saved("a FlatIR")

    @property
    def stablehlo(self) -> StableHLO:
        return read_portable(self.portable)

    def module(self) -> StableHLO:
        return self.stablehlo


def _not_saved(what: str) -> ArgumentError:
    return ArgumentError(expected("an executable compiled in this process", of=what, got="a loaded one", do="use its stablehlo"))
