"""From a trace to a compiled program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from fusible.lazy.config import config
from fusible.lazy.engine.engine import EngineRefusal, Program
from fusible.lazy.engine.engines import current_engine
from fusible.lazy.evaluation import binary_cache
from fusible.lazy.flat_ir.diagnostics import refusal
from fusible.lazy.flat_ir.passes import DEFAULT_PASSES
from fusible.lazy.logger import logger
from fusible.lazy.trace import Trace

__all__ = ["compile_trace", "notify", "watching"]

Watcher = Callable[[str, Trace], None]

_WATCHERS: list[Watcher] = []


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Call ``watcher("evaluation" or "compilation", trace)`` for every program that is asked for while the context is open, compiled or known."""
    _WATCHERS.append(watcher)
    try:
        yield
    finally:
        _WATCHERS.remove(watcher)


def notify(kind: str, trace: Trace) -> None:
    """Tell the watchers."""
    for watcher in _WATCHERS:
        watcher(kind, trace)


def compile_trace(trace: Trace, level: int, aliases: Mapping[int, int], read: Collection[int] = ()) -> Program:
    """Lower ``trace`` through FlatIR and StableHLO, and compile it with the current engine.

    ``level`` is the compiler's effort, 0 to 3. ``aliases`` maps an input to the output that takes over its memory. ``read`` has the positions in
    ``Trace.parts`` of the literals that the program reads, after its other inputs.

    Each IR is written to its channel of the logger: the trace, the FlatIR as it was lowered, what the passes did to it, and the module that is
    compiled. Raises ``CompileError`` with the user's line where MLIR or the engine refuses an operation, ``BackendError`` where there is no engine.
    """
    engine = current_engine()
    logger.trace(lambda: str(trace))
    with logger.timed("lowering"):
        lowered = trace.to_flat_ir(read)
        flat = lowered.run(*DEFAULT_PASSES)
    logger.flat_ir(lambda: str(lowered))
    logger.flat_ir(lambda: "\n".join(["==== Flat IR passes ====", *map(str, flat.report)]))
    with logger.timed("building StableHLO"):
        module = flat.to_stablehlo(aliases)
        artifact = getattr(module, engine.ARTIFACT)
    logger.mlir(lambda: str(module))
    inputs, outputs = ([(t.shape, t.dtype) for t in tensors] for tensors in (flat.inputs, flat.outputs))
    directory = config.timing_cache_file_path
    try:
        with logger.timed(f"compilation by {engine.NAME}"):
            if directory is None:
                return engine.compile(artifact, inputs, outputs, level)
            return binary_cache.load_or_compile(directory, engine, module, inputs, outputs, level)
    except EngineRefusal as error:
        raise refusal(flat, error.reason, error.wanted, module.located_text) from error
