"""IREE as an engine, an optional extra: its compiler and runtime are published packages with documented interfaces."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np

from fusible.lazy.dtypes import dtype
from fusible.lazy.engine import pjrt
from fusible.lazy.engine.engine import Engine, EngineRefusal, Types
from fusible.lazy.engine.host import aligned
from fusible.locks import Lock

__all__ = ["IREE"]

_FLAGS = (
    "--iree-input-type=stablehlo",
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-llvmcpu-target-cpu=host",
    "--iree-input-demote-f64-to-f32=false",
)

_ELEMENTS = {
    "float32": "FLOAT_32",
    "float16": "FLOAT_16",
    "bfloat16": "BFLOAT_16",
    "float64": "FLOAT_64",
    "float8": "FLOAT_8_E4M3_FN",
    "float8e5m2": "FLOAT_8_E5M2",
    "int8": "SINT_8",
    "int16": "SINT_16",
    "int32": "SINT_32",
    "int64": "SINT_64",
    "uint8": "UINT_8",
    "uint32": "UINT_32",
    "uint64": "UINT_64",
    "bool": "BOOL_8",
}
"""IREE's name of every element type; int4, which it packs in pairs, is refused."""

_PACKAGES = ("iree-base-compiler", "iree-base-runtime")


class IREE(Engine):
    """IREE's compiler for this CPU (llvm-cpu) and its local device."""

    NAME = "iree"

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("iree") and importlib.util.find_spec("iree.compiler") and importlib.util.find_spec("iree.runtime"):
            return None
        return f"{' and '.join(_PACKAGES)} are not installed: pip install 'fusible[iree]'"

    def fingerprint(self) -> str:
        versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
        return f"{versions} {_FLAGS} {platform.machine()} {platform.processor()}"

    def compile(self, artifact: bytes, inputs: Types, outputs: Types, level: int = 3) -> _IREEProgram:
        """See ``Engine``. The effort is IREE's own, whatever ``level`` is."""
        compiler = importlib.import_module("iree.compiler")
        _check(inputs, outputs)
        try:
            binary = compiler.compile_str(artifact, extra_args=list(_FLAGS))
        except (compiler.CompilerToolError, RuntimeError, ValueError) as error:
            raise EngineRefusal("a module that IREE compiles", _errors(str(error))) from error
        return self.load(binary, inputs, outputs)

    def load(self, binary: bytes, inputs: Types, outputs: Types) -> _IREEProgram:
        _check(inputs, outputs)
        try:
            return _IREEProgram(binary, inputs, outputs)
        except (RuntimeError, ValueError) as error:
            raise EngineRefusal("a binary that IREE loads", str(error)) from error


def _errors(said: str) -> str:
    """The lines of the compiler's message that name an error and where it is; not the source and the command line that it repeats."""
    return "\n".join(line.strip() for line in said.split("\n") if "error: " in line) or said


def _check(*sides: Types) -> None:
    for shape, of in (tensor for side in sides for tensor in side):
        if of.name not in _ELEMENTS:
            raise EngineRefusal("a module that IREE compiles", f"a tensor of {of}, which it packs in a way of its own")
        if 0 in shape:
            raise EngineRefusal("a module that IREE compiles", f"a tensor of shape {shape}, without elements")


def _plain(of: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that carries the bits of ``of`` through the buffer protocol: unsigned integers for bool and for dtypes of ``ml_dtypes``."""
    return of if of.isbuiltin == 1 and of.kind != "b" else np.dtype(f"u{of.itemsize}")


@functools.cache
def _device() -> tuple[Any, Any, Any]:
    """IREE's runtime package, its instance and its device, one each for the process."""
    runtime = importlib.import_module("iree.runtime")
    config = runtime.Config("local-task")
    return runtime, config.vm_instance, config.device


class _IREEProgram(pjrt.BufferProgram):
    """A loaded module with its own context. IREE's contexts take one call at a time."""

    def __init__(self, binary: bytes, inputs: Types, outputs: Types) -> None:
        self._runtime, instance, self._device = _device()
        self._binary = binary
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        hal = self._runtime.create_hal_module(instance, self._device)
        module = self._runtime.VmModule.copy_buffer(instance, binary)
        self._context = self._runtime.VmContext(instance, modules=[hal, module])
        self._main = module.lookup_function("main")
        self._elements = [self._element(of) for _, of in self.inputs]
        self._lock = Lock()

    def _element(self, of: dtype) -> Any:
        return getattr(self._runtime.HalElementType, _ELEMENTS[of.name])

    def execute(self, buffers: Sequence[Any]) -> list[Any]:
        """Operands are copied into IREE's memory, and results out of it: stored tensors are XLA's buffers, whatever engine runs."""
        runtime = self._runtime
        inputs, made = runtime.VmVariantList(len(buffers)), runtime.VmVariantList(len(self.outputs))
        for i, buffer in enumerate(buffers):
            inputs.push_ref(self._copied(i, pjrt.host_view(buffer, *self.inputs[i])))
        with self._lock:
            self._context.invoke(self._main, inputs, made)
        results = []
        for i, (shape, of) in enumerate(self.outputs):
            mapped = made.get_as_object(i, runtime.HalBufferView).map()
            results.append(pjrt.place(aligned(mapped.asarray(shape, _plain(of.numpy)).view(of.numpy)), of))
        return results

    def _copied(self, index: int, array: np.ndarray[Any, Any]) -> Any:
        runtime = self._runtime
        return self._device.allocator.allocate_buffer_copy(
            memory_type=runtime.MemoryType.DEVICE_LOCAL,
            allowed_usage=runtime.BufferUsage.DEFAULT | runtime.BufferUsage.MAPPING,
            device=self._device,
            buffer=array.view(_plain(array.dtype)),
            element_type=self._elements[index],
        )

    def serialize(self) -> bytes:
        return self._binary
