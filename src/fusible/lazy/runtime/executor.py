"""From a trace to a compiled program, and the cache of programs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType

from fusible.errors import CompileError, expected
from fusible.lazy.config import config
from fusible.lazy.runtime import pjrt
from fusible.lazy.runtime.compiler import compile_trace, notify
from fusible.lazy.runtime.engine import Program
from fusible.lazy.runtime.host import Array
from fusible.lazy.source import describe
from fusible.lazy.trace.ops.storage import Storage
from fusible.lazy.trace.tensor import TraceTensor
from fusible.lazy.trace.trace import Trace
from fusible.locks import Lock

__all__ = ["CACHE", "ProgramCache", "evaluate", "program_of", "settle"]

_NONE: Mapping[int, int] = MappingProxyType({})


class ProgramCache:
    """Compiled programs by the key of their trace, least recently used first; safe under threads."""

    def __init__(self, capacity: int = 1024) -> None:
        self.capacity = capacity
        self.compiled = 0
        self._lock = Lock()
        self._programs: OrderedDict[object, Program] = OrderedDict()

    def get(self, trace: Trace, level: int = 3, aliases: Mapping[int, int] = _NONE) -> Program:
        """The program of ``trace``, compiled unless one of an equal key is there."""
        key = (config.engine, level, trace.key(), *aliases.items())
        with self._lock:
            found = self._programs.get(key)
            if found is not None:
                self._programs.move_to_end(key)
                return found
        program = compile_trace(trace, level, aliases)
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


def program_of(trace: Trace, level: int = 3, aliases: Mapping[int, int] = _NONE, kind: str = "compilation") -> Program:
    """The cached program of ``trace``; raises ``CompileError`` where it reads an argument of another function being compiled.

    ``kind`` is "compilation" or "evaluation": what is told to those who watch, and an evaluation leaves the cache where ``config`` says so.
    """
    pjrt.check_process()
    if trace.tracers:
        tracer = trace.tracers[0]
        got = f"one that depends on the argument {tracer.name} of a function being compiled (at {describe(tracer.source)})"
        raise CompileError(
            expected("tensors with values", of="an evaluation", got=got, do="return it from the function instead of using its value inside")
        )
    notify(kind, trace)
    if kind == "compilation" or config.use_cache_in_eager_mode:
        return CACHE.get(trace, level, aliases)
    return compile_trace(trace, level, aliases)


def settle(tensor: TraceTensor) -> Storage:
    """Compute a recorded tensor, which becomes a stored one, as do the other outputs of its operation.

    Together, so that no program finds some outputs of an operation stored and others to be computed.
    """
    producer = tensor.producer
    if isinstance(producer, Storage):
        return producer
    trace = Trace(producer.outputs)
    buffers = program_of(trace, kind="evaluation").launch([storage.placed() for storage in trace.storages])
    for output, buffer in zip(producer.outputs, buffers, strict=True):
        stored = Storage(output.shape, output.dtype, buffer=buffer)
        stored.bind((), (output,))
        output.producer = stored
    return tensor.producer  # type: ignore[return-value]


def evaluate(tensor: TraceTensor) -> Array:
    """The value of a recorded tensor, which becomes a stored one."""
    return settle(tensor).data
