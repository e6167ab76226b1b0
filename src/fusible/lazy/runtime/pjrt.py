"""The one file that touches jaxlib's unpublished names: MLIR contexts, compilation and execution by PJRT.

Names used, none of which jaxlib promises to keep (measured to work from 0.8.3 to 0.10.2):

* ``jaxlib.mlir.ir``, ``jaxlib.mlir.dialects.{func, stablehlo, chlo}``, ``jaxlib.mlir._mlir_libs._jax_mlir_ext.register_dialects``
* ``jaxlib.xla_client``: ``make_cpu_client``, ``DeviceList``, ``CompileOptions``, ``SingleDeviceSharding``, ``HloSharding``,
  ``batched_device_put``, ``array_result_handler``, ``XlaRuntimeError``
* methods: ``Client.compile_and_load``, ``LoadedExecutable.execute_sharded``, ``ExecuteResults.consume_with_handlers``,
  ``ArrayImpl.{block_until_ready, unsafe_buffer_pointer}``

The client is synchronous: a call runs in the caller's thread (with XLA's thread pool beneath) and returns when its results are ready and
its operands are no longer read. That also saves a hop between threads (5 us a call against 15 us).

XLA's kernels flush float32 (and bfloat16) subnormals to zero in arithmetic; its conversions to narrower types are exact for them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fusible.errors import CompileError, ForkError, expected
from fusible.lazy.dtypes import dtype
from fusible.lazy.printing import Shape
from fusible.lazy.runtime.host import ALIGNMENT, aligned, pointer, view

__all__ = ["Program", "check_process", "compile_module", "mlir_context", "mlir_modules"]

_OPTIONS: list[tuple[str, bool]] = [("xla_allow_excess_precision", False)]
"""Without this XLA drops roundings to a narrower type (it keeps a chain of bf16 additions in float32)."""


class _Engine(NamedTuple):
    """The client, its one device, and what placing and taking arrays needs."""

    client: Any
    device: Any
    devices: Any
    sharding: Any
    put: Any
    handler: Any
    options: Any


class _Aval(NamedTuple):
    """What PJRT's array constructors read of an array's type."""

    shape: Shape
    dtype: np.dtype[Any]
    ndim: int
    size: int
    weak_type: bool = False


class _State:
    """The process's engine. ``forked`` is set in a child of a process that had one: its threads did not follow."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: _Engine | None = None
        self.forked = False

    def after_fork(self) -> None:
        self.lock = threading.Lock()
        self.forked = self.forked or self.engine is not None


_STATE = _State()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_STATE.after_fork)


def check_process() -> None:
    """Raise ``ForkError`` in a forked child of a process that has executed: XLA's threads exist in the parent only."""
    if _STATE.forked:
        raise ForkError(
            expected("a fresh process", of="compiled execution", got="a forked child of a process that has already executed",
                     do='start the process with multiprocessing.get_context("spawn")')
        )  # fmt: skip


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


def _engine() -> _Engine:
    check_process()
    with _STATE.lock:
        if _STATE.engine is None:
            xla = _load()[0]

            class _Sharding(xla.SingleDeviceSharding):
                memory_kind = None

                def _to_xla_hlo_sharding(self, ndim: int) -> Any:
                    return xla.HloSharding.replicate()

            client = xla.make_cpu_client(asynchronous=False)
            device = client.devices()[0]
            options = xla.CompileOptions()
            options.env_option_overrides = list(_OPTIONS)
            _STATE.engine = _Engine(
                client, device, xla.DeviceList((device,)), _Sharding(device), xla.batched_device_put, xla.array_result_handler, options
            )
        return _STATE.engine


def _aval(shape: Shape, of: dtype) -> _Aval:
    return _Aval(shape, of.numpy, len(shape), int(np.prod(shape, dtype=np.int64)))


class Program:
    """A compiled module. Calling it runs it on host arrays and returns host arrays that it alone owns.

    PJRT checks nothing but byte sizes, so ``__call__`` trusts its caller for dtypes and shapes: ``Executable`` checks them. Every array
    must be C-contiguous; one that is not aligned to 64 bytes is copied first.
    """

    def __init__(self, module: bytes, inputs: Sequence[tuple[Shape, dtype]], outputs: Sequence[tuple[Shape, dtype]]) -> None:
        self._engine = engine = _engine()
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._in = [_aval(*of) for of in inputs]
        self._devices = [engine.device]
        self._handlers = [engine.handler(_aval(*of), engine.sharding, True, True) for of in outputs]
        try:
            self._loaded = engine.client.compile_and_load(module, engine.devices, engine.options)
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise CompileError(
                expected("a module that XLA compiles", of="a recorded program", got=reason, do="simplify the program, or report it")
            ) from error

    def put(self, index: int, array: np.ndarray[Any, Any]) -> Any:
        """The device's array for input ``index``; it shares the memory of ``array``, which must outlive it, where that is aligned."""
        if pointer(array) % ALIGNMENT:
            array = aligned(array)
        engine = self._engine
        return engine.put(self._in[index], engine.sharding, [array], self._devices, True, enable_x64=True)

    def run(self, arrays: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
        """Run on the device's arrays (of ``put``), and wait. The results are writable host arrays."""
        if _STATE.forked:
            check_process()
        results = self._loaded.execute_sharded(list(arrays)).consume_with_handlers(self._handlers)
        host = []
        for result, (shape, of) in zip(results, self.outputs, strict=True):
            result.block_until_ready()
            host.append(view(result.unsafe_buffer_pointer(), shape, of.numpy, result))
        return host

    def __call__(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        if _STATE.forked:
            check_process()
        return self.run([self.put(i, array) for i, array in enumerate(arrays)])


def compile_module(module: bytes, inputs: Sequence[tuple[Shape, dtype]], outputs: Sequence[tuple[Shape, dtype]]) -> Program:
    """Compile the MLIR bytecode of a StableHLO module whose ``main`` has these inputs and outputs.

    Raises ``CompileError`` where XLA refuses it, and ``ForkError`` in a forked child.
    """
    return Program(module, inputs, outputs)
