"""The one file that touches jaxlib's unpublished names: MLIR contexts, compilation and execution by PJRT.

Names used, none of which jaxlib promises to keep (all measured to be there in 0.8.0, 0.8.2, 0.8.3 and 0.10.2):

* ``jaxlib.mlir.ir``, ``jaxlib.mlir.dialects.{func, stablehlo, chlo}``, ``jaxlib.mlir._mlir_libs._jax_mlir_ext.register_dialects``
* ``jaxlib.mlir.dialects.stablehlo``: ``register_dialect``, ``serialize_portable_artifact``
* ``jaxlib.xla_client``: ``make_cpu_client``, ``DeviceList``, ``CompileOptions``, ``SingleDeviceSharding``, ``HloSharding``,
  ``batched_device_put``, ``array_result_handler``, ``register_custom_call_target``; ``jaxlib.version.__version__``
* methods: ``Client.{compile_and_load, serialize_executable, deserialize_executable}``, ``LoadedExecutable.execute_sharded``,
  ``ExecuteResults.consume_with_handlers``, ``ArrayImpl.{block_until_ready, unsafe_buffer_pointer}``
* ``jaxlib.mlir.passmanager.PassManager``, and of the StableHLO bindings ``register_stablehlo_passes``, ``deserialize_portable_artifact``,
  ``get_version_from_compatibility_requirement``

``tests/conformance/lazy/test_lazy_engine.py`` checks each of them for what is used here; ``make test-jaxlib VERSION=...`` runs it on another jaxlib.

The client is synchronous: a call runs in the caller's thread (with XLA's thread pool beneath) and returns when its results are ready and
its operands are no longer read. That also saves a hop between threads (5 us a call against 15 us).

XLA's kernels flush float32 (and bfloat16) subnormals to zero in arithmetic; its conversions to narrower types are exact for them.
"""

# ruff: noqa: PLC0415 - jaxlib is imported at first need
from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import platform
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fusible.errors import ExecutionError, ForkError, expected
from fusible.knobs import setting
from fusible.lazy.dtypes import dtype
from fusible.lazy.engine import engine as engines
from fusible.lazy.engine.engine import EngineRefusal, Types
from fusible.lazy.engine.host import ALIGNMENT, aligned, pointer, view
from fusible.lazy.printing import Shape
from fusible.locks import Lock
from fusible.machine import proc_cpuinfo, usable_processors

__all__ = [
    "BufferProgram",
    "PJRT",
    "Program",
    "check_process",
    "host_view",
    "mlir_context",
    "mlir_modules",
    "pass_manager",
    "place",
    "register_target",
    "run_large_by",
    "shares",
    "when_missing",
]

_MOST = 3
"""XLA's own level of optimisation."""

_OPTIONS: list[tuple[str, bool]] = [("xla_allow_excess_precision", False)]
"""Without this XLA drops roundings to a narrower type (it keeps a chain of bf16 additions in float32)."""


class _Engine(NamedTuple):
    """The client, its one device, and what placing and taking arrays needs."""

    client: Any
    sole: list[Any]
    devices: Any
    sharding: Any
    put: Any
    handler: Any
    options: Any


class _Aval(NamedTuple):
    """The type of an array, with the attributes that PJRT's array constructors read."""

    shape: Shape
    dtype: np.dtype[Any]
    ndim: int
    size: int
    weak_type: bool = False


_Around = Callable[[Callable[[], object]], Any]


class _State:
    """The process's engine. ``forked`` is set in a forked child of a process that had one: a child has none of the parent's threads. ``around``: what
    runs the runs of large programs."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.engine: _Engine | None = None
        self.forked = False
        self.around: _Around | None = None

    def after_fork(self) -> None:
        self.forked = self.forked or self.engine is not None


_STATE = _State()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_STATE.after_fork)


def check_process() -> None:
    """Raise ``ForkError`` in a forked child of a process that has executed: XLA's threads exist in the parent only."""
    if _STATE.forked:
        do = 'start the process with multiprocessing.get_context("spawn")'
        raise ForkError(expected("a fresh process", of="compiled execution", got="a forked child of a process that has already executed", do=do))


def _load() -> tuple[Any, ...]:
    """jaxlib's modules, imported at first need: they cost 0.1 to 0.2 s."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    from jaxlib import xla_client
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, func, stablehlo

    return xla_client, ir, stablehlo, func, chlo, _jax_mlir_ext


def mlir_modules() -> tuple[Any, Any, Any]:
    """The bindings' ``ir``, ``stablehlo`` and ``func`` modules."""
    _, ir, stablehlo, func, _, _ = _load()
    return ir, stablehlo, func


def pass_manager() -> Any:
    """The bindings' ``PassManager``, with the StableHLO passes registered."""
    from jaxlib.mlir.passmanager import PassManager

    _load()[2].register_stablehlo_passes()
    return PassManager


def mlir_context() -> Any:
    """A new MLIR context with the StableHLO dialect registered."""
    _, ir, stablehlo, _, chlo, ext = _load()
    registry = ir.DialectRegistry()
    ext.register_dialects(registry)
    context = ir.Context()
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    context.enable_multithreading(False)
    stablehlo.register_dialect(context)
    chlo.register_dialect(context)
    return context


_TYPED = 1
"""The version of the foreign-function interface whose handlers declare the types that they take."""


def register_target(name: str, handler: Any) -> None:
    """Let custom calls of ``name`` run ``handler``, a capsule of an XLA FFI handler. XLA keeps it for the life of the process."""
    _load()[0].register_custom_call_target(name, handler, "cpu", api_version=_TYPED)


def run_large_by(around: _Around) -> None:
    """Let ``around(run)``, which gives back what ``run()`` does, run each program that reads and writes ``_LARGE`` bytes or more."""
    _STATE.around = around


_LARGE = 1 << 18
"""Bytes of a program's inputs and outputs, from which on threads that help are worth being woken for it: a native loop has one for each 64 KiB."""
_MISSING = re.compile(r"No FFI handler registered for (\S+)|No registered implementation for custom call to (\S+)")
_finders: list[Callable[[str], None]] = []


def when_missing(find: Callable[[str], None]) -> None:
    """Let ``find(target)`` register a target that a program calls, or raise."""
    _finders.append(find)


def _with_targets(load: Callable[[], Any]) -> Any:
    """``load()``, once more for each target that XLA does not know."""
    former = None
    while True:
        try:
            return load()
        except (RuntimeError, ValueError) as error:
            found = _MISSING.search(str(error))
            target = found and (found[1] or found[2])
            if not target or target == former:
                raise
            former = target
            for find in _finders:
                find(target)


def _options(more: Sequence[tuple[str, int]] = ()) -> Any:
    options = _load()[0].CompileOptions()
    options.env_option_overrides = [*_OPTIONS, *more]
    return options


def _threads() -> int:
    """How many threads the engine starts, for which it asks ``NPROC``: programs run on the caller's, too. With one more than there are processors,
    one waits for a processor in the midst of a task, and all others for the task."""
    return max(1, usable_processors() - 1)


def _engine() -> _Engine:
    check_process()
    with _STATE.lock:
        if _STATE.engine is None:
            xla = _load()[0]

            class _Sharding(xla.SingleDeviceSharding):
                memory_kind = None

                def _to_xla_hlo_sharding(self, ndim: int) -> Any:
                    return xla.HloSharding.replicate()

            with setting(NPROC=str(_threads())):
                client = xla.make_cpu_client(asynchronous=False)
            device = client.devices()[0]
            devices, sharding = xla.DeviceList((device,)), _Sharding(device)
            _STATE.engine = _Engine(client, [device], devices, sharding, xla.batched_device_put, xla.array_result_handler, _options())
        return _STATE.engine


@functools.lru_cache(maxsize=4096)
def _aval(shape: Shape, of: dtype) -> _Aval:
    return _Aval(shape, of.numpy, len(shape), math.prod(shape))


def place(array: np.ndarray[Any, Any], of: dtype) -> Any:
    """The engine's buffer of a C-contiguous array; it keeps the memory of ``array`` where it ``shares`` it."""
    engine = _STATE.engine or _engine()
    if _STATE.forked:
        check_process()
    if pointer(array) % ALIGNMENT:
        array = aligned(array)
    return engine.put(_aval(array.shape, of), engine.sharding, [array], engine.sole, True, enable_x64=True)


def shares(array: np.ndarray[Any, Any], of: dtype) -> bool:
    """Whether the buffer that ``place`` makes of an array shares its memory, so that the next call reads what is written to the array.

    The engine itself could tell, at 150 us: it looks for jax at the first such question about a buffer.
    """
    return of.bits >= 8 and pointer(array) % ALIGNMENT == 0


def host_view(buffer: Any, shape: Shape, of: dtype) -> np.ndarray[Any, Any]:
    """The writable array that shares the memory of a buffer, and keeps it. Of int4, which the engine packs by two, it is a copy."""
    if of.bits < 8:
        count = math.prod(shape)
        packed = view(buffer.unsafe_buffer_pointer(), ((count + 1) // 2,), np.dtype(np.uint8), buffer)
        nibbles = np.stack([packed << 4, packed & 0xF0], 1).view(np.int8).reshape(-1)[:count] >> 4
        return aligned(nibbles.astype(of.numpy).reshape(shape))
    return view(buffer.unsafe_buffer_pointer(), shape, of.numpy, buffer)


class BufferProgram(engines.Program):
    """A program whose inputs and outputs are XLA's buffers, as those of stored tensors are, whatever engine runs it."""

    def put(self, index: int, array: np.ndarray[Any, Any]) -> Any:
        return place(array, self.inputs[index][1])

    def fetch(self, index: int, buffer: Any) -> np.ndarray[Any, Any]:
        return host_view(buffer, *self.outputs[index])


class Program(BufferProgram):
    """A program loaded by XLA. An array that is not aligned to 64 bytes is copied before a call, others are read in place."""

    def __init__(self, load: Callable[[_Engine], Any], inputs: Types, outputs: Types, binary: bytes | None = None) -> None:
        self._engine = engine = _engine()
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._binary = binary
        self._handlers = [engine.handler(_aval(*of), engine.sharding, True, True) for of in outputs]
        self._large = sum(math.prod(shape) * of.bits for shape, of in (*self.inputs, *self.outputs)) >= 8 * _LARGE
        try:
            self._loaded = _with_targets(lambda: load(engine))
        except (RuntimeError, ValueError) as error:
            raise EngineRefusal("a module that XLA compiles", str(error)) from error

    def execute(self, buffers: Sequence[Any]) -> list[Any]:
        """See ``engine``. Raises ``ExecutionError`` where memory runs out, or a plugin that the program calls fails or refuses its operands."""
        if _STATE.forked:
            check_process()
        around = _STATE.around if self._large else None
        try:
            return self._run(buffers) if around is None else around(lambda: self._run(buffers))  # type: ignore[no-any-return]
        except RuntimeError as error:
            reason = " ".join(str(error).split()).rstrip(".")
            do = "make its tensors smaller" if "RESOURCE_EXHAUSTED" in reason else "pass the plugins that it calls what they take"
            raise ExecutionError(expected("a run without failure", of="a compiled program", got=reason, do=do)) from error

    def _run(self, buffers: Sequence[Any]) -> list[Any]:
        results = self._loaded.execute_sharded(buffers).consume_with_handlers(self._handlers)
        for result in results:
            result.block_until_ready()
        return results

    def serialize(self) -> bytes:
        """See ``engine``. A binary that was loaded is given back as it was: the engine keeps only a part of it."""
        return self._engine.client.serialize_executable(self._loaded) if self._binary is None else self._binary


class PJRT(engines.Engine):
    """XLA for the CPU, from jaxlib."""

    NAME = "pjrt"
    ARTIFACT = "bytecode"

    def unavailable(self) -> str | None:
        return None if importlib.util.find_spec("jaxlib") else "jaxlib is not installed: pip install 'fusible[xla]'"

    def fingerprint(self) -> str:
        """The version of jaxlib, the options, and the processor: XLA compiles for the instructions that it finds."""
        version = importlib.import_module("jaxlib.version").__version__
        return f"jaxlib {version} {_OPTIONS} {platform.machine()} {_cpu_flags()}"

    def compile(self, artifact: bytes, inputs: Types, outputs: Types, level: int = _MOST) -> Program:
        """See ``Engine``. ``artifact`` may be bytecode or portable. Raises ``ForkError`` in a forked child of a process that has executed."""

        def load(engine: _Engine) -> Any:
            options = engine.options if level >= _MOST else _options([("xla_backend_optimization_level", level)])
            return engine.client.compile_and_load(artifact, engine.devices, options)

        return Program(load, inputs, outputs)

    def load(self, binary: bytes, inputs: Types, outputs: Types) -> Program:
        return Program(lambda engine: engine.client.deserialize_executable(binary, engine.devices, engine.options), inputs, outputs, binary)


@functools.cache
def _cpu_flags() -> str:
    """The instruction sets of this processor, where the system tells them."""
    return proc_cpuinfo("flags", "Features") or platform.processor()
