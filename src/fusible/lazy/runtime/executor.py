"""From a trace to a compiled program, and the cache of programs."""

from __future__ import annotations

import threading
from collections import OrderedDict

from fusible.errors import CompileError, expected
from fusible.lazy.flat_ir.passes import DEFAULT_PASSES
from fusible.lazy.runtime import pjrt
from fusible.lazy.runtime.host import Array
from fusible.lazy.source import describe
from fusible.lazy.trace.ops.storage import Storage
from fusible.lazy.trace.tensor import TraceTensor
from fusible.lazy.trace.trace import Trace

__all__ = ["CACHE", "ProgramCache", "evaluate", "program_of"]


class ProgramCache:
    """Compiled programs by the printed form of their trace, least recently used first; safe under threads."""

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self.compiled = 0
        self._lock = threading.Lock()
        self._programs: OrderedDict[str, pjrt.Program] = OrderedDict()

    def get(self, trace: Trace) -> pjrt.Program:
        """The program of ``trace``, compiled unless one that prints alike is there."""
        key = str(trace)
        with self._lock:
            found = self._programs.get(key)
            if found is not None:
                self._programs.move_to_end(key)
                return found
        program = compile_trace(trace)
        with self._lock:
            self.compiled += 1
            self._programs[key] = program
            while len(self._programs) > self.capacity:
                self._programs.popitem(last=False)
        return program

    def clear(self) -> None:
        with self._lock:
            self._programs.clear()

    def __len__(self) -> int:
        return len(self._programs)


CACHE = ProgramCache()


def compile_trace(trace: Trace) -> pjrt.Program:
    """Lower ``trace`` through FlatIR and StableHLO, and compile it."""
    flat = trace.to_flat_ir().run(*DEFAULT_PASSES)
    types = [[(t.shape, t.dtype) for t in tensors] for tensors in (flat.inputs, flat.outputs)]
    return pjrt.compile_module(flat.to_stablehlo().bytecode, *types)


def program_of(trace: Trace) -> pjrt.Program:
    """The cached program of ``trace``; raises ``CompileError`` where it reads an argument of another function being compiled."""
    pjrt.check_process()
    if trace.tracers:
        got = f"one that depends on the argument made at {describe(trace.tracers[0].source)} of a function being compiled"
        raise CompileError(
            expected("tensors with values", of="an evaluation", got=got, do="return it from the function instead of using its value inside")
        )
    return CACHE.get(trace)


def evaluate(tensor: TraceTensor) -> Array:
    """The value of a recorded tensor, which becomes a stored one."""
    producer = tensor.producer
    if isinstance(producer, Storage):
        return producer.data
    trace = Trace([tensor])
    value = program_of(trace)([storage.data for storage in trace.storages])[0]
    stored = Storage(tensor.shape, tensor.dtype, value)
    stored.bind((), (tensor,))
    tensor.producer = stored
    return value
