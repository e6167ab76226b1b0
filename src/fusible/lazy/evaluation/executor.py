"""From a trace to a compiled program, and from a recorded tensor to its value."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fusible.errors import CompileError, expected
from fusible.lazy.config import config
from fusible.lazy.engine import pjrt
from fusible.lazy.engine.engine import Program
from fusible.lazy.engine.host import Array
from fusible.lazy.evaluation.compiler import compile_trace, notify
from fusible.lazy.evaluation.program_cache import CACHE
from fusible.lazy.source import describe
from fusible.lazy.trace import Storage, Trace, TraceTensor

__all__ = ["CACHE", "awaits_call", "evaluate", "materialize", "program_of"]

_NONE: Mapping[int, int] = MappingProxyType({})


def program_of(trace: Trace, level: int = 3, aliases: Mapping[int, int] = _NONE) -> Program:
    """The cached program of ``trace``; raises ``CompileError`` where it reads an argument of another function being compiled."""
    _admit(trace, "compilation")
    return CACHE.get(trace, level, aliases)


def _admit(trace: Trace, kind: str) -> None:
    """Raise ``CompileError`` for a trace that has no value, and notify the watchers. ``kind`` is "compilation" or "evaluation"."""
    pjrt.check_process()
    if trace.tracers:
        tracer = trace.tracers[0]
        got = f"one that depends on the argument {tracer.name} of a function being compiled (at {describe(tracer.source)})"
        wanted = "tensors with values"
        raise CompileError(expected(wanted, of="an evaluation", got=got, do="return it from the function instead of using its value inside"))
    notify(kind, trace)


def awaits_call(tensor: TraceTensor) -> bool:
    """Whether the value depends on an argument of a function that is being compiled, so that only a call has it."""
    return not isinstance(tensor.producer, Storage) and bool(Trace([tensor]).tracers)


def materialize(tensor: TraceTensor) -> Storage:
    """Compute a recorded tensor, which becomes a stored one, together with the other outputs of its operation.

    So no later program finds some outputs of an operation stored and others still to be computed. The cache of programs is not used where
    ``config.use_cache_in_eager_mode`` is off.
    """
    producer = tensor.producer
    if isinstance(producer, Storage):
        return producer
    trace = Trace(producer.outputs)
    _admit(trace, "evaluation")
    program, literals = CACHE.evaluation(trace) if config.use_cache_in_eager_mode else (compile_trace(trace, 3, _NONE), None)
    operands = [storage.placed() for storage in trace.storages]
    if literals is None:
        buffers = program.launch(operands)
    else:
        buffers = program.launch(operands + literals.buffers)
        literals.release()
    for output, buffer in zip(producer.outputs, buffers, strict=True):
        stored = Storage(output.shape, output.dtype, buffer=buffer)
        stored.bind((), (output,))
        output.producer = stored
    return tensor.producer  # type: ignore[return-value]


def evaluate(tensor: TraceTensor) -> Array:
    """The value of a recorded tensor, which becomes a stored one."""
    return materialize(tensor).data
