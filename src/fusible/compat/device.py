"""A GPU's requests, answered by the host: every ``"cuda"`` that reaches torch becomes the CPU, and ``torch.cuda`` answers as a device that is there.

All of it is in this file and in force only within ``cuda_on_cpu()``. Two means: a ``TorchFunctionMode`` sees every call into torch and maps devices
among its arguments; what torch does not show to modes (the functions of ``torch.cuda`` and a few constructors) is put in place by the table
``_replacements`` and taken back at the end.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch.overrides import TorchFunctionMode

from fusible import knobs
from fusible.errors import NotServedError, expected
from fusible.machine import installed_memory, peak_memory

__all__ = ["cuda_on_cpu"]

_CAPABILITY = (9, 0)
"""The lowest for which NVIDIA's package has FP8 block scaling; FP8 data keeps its transposed copy beside it."""
_CUDA_VERSION = "12.9"
_CPU = torch.device("cpu")
_DTYPES = frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype))
_MEMORY_IN_USE = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Serve requests for a CUDA device by the CPU while the context is open, in this thread.

    ``"cuda"``, ``"cuda:i"``, a device index, ``.cuda()`` and ``.to("cuda")`` mean the CPU; ``Tensor.is_cuda`` is true; ``torch.cuda`` says that there
    is one device, of compute capability 9.0; streams, events and profiler ranges are there and do nothing but time; the device's random generator is
    the host's; its memory is the process's resident memory. Triton kernels that are defined within the context run in Triton's interpreter.
    ``Tensor.device`` keeps telling the truth: ``cpu``.
    """
    with ExitStack() as stack:
        stack.enter_context(knobs.setting(TRITON_INTERPRET="1"))
        for owner, name, value in _replacements():
            stack.enter_context(_replaced(owner, name, value))
        stack.enter_context(_OnCpu())
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    inherited, former = name not in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, former)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


def _on_cpu(device: Any) -> Any:
    """A device as the CPU where it is a CUDA device: by name, as an object or as an index."""
    return _CPU if _is_cuda(device) or (isinstance(device, int) and not isinstance(device, bool)) else device


_getter_is_cuda = torch.Tensor.is_cuda.__get__  # pyright: ignore[reportAttributeAccessIssue]


_parse_to = torch._C._nn._parse_to  # pyright: ignore[reportAttributeAccessIssue]


def _itself(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return tensor


_CALLS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.cuda: _itself,
    torch.Tensor.pin_memory: _itself,
    torch.Tensor.to: lambda tensor, *args, **kwargs: tensor.to(*map(_on_cpu, args[:1]), *args[1:], **kwargs),
    _parse_to: lambda *args, **kwargs: _parse_to(*map(_on_cpu, args[:1]), *args[1:], **kwargs),  # of Module.to
    torch.device: lambda first, *rest, **kwargs: _CPU if _is_cuda(first) else torch.device(first, *rest, **kwargs),
    _getter_is_cuda: lambda tensor: tensor.device.type == "cpu",
}
"""The calls that mean something else on the host."""


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        meaning = _CALLS.get(func)
        return func(*args, **kwargs) if meaning is None else meaning(*args, **kwargs)


class _Stream:
    """A stream of work that is done when it is asked for."""

    cuda_stream = 0
    device = _CPU
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...


class _Event:
    """A moment; between two of them ``elapsed_time`` is in milliseconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return (end._at - self._at) * 1e3

    def synchronize(self) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True


_STREAM = _Stream()


class _Graph:
    """A graph of kernels, which the host has none of."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotServedError(expected("a GPU", of="torch.accelerator.Graph", got="the CPU in its place", do="run the steps eagerly"))


class _AnyGenerator(type(torch.Generator)):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _TorchGenerator)


_TorchGenerator = torch.Generator


class _Generator(torch.Generator, metaclass=_AnyGenerator):
    """Makes generators of the host; every generator is an instance of it, as of the class whose place it takes."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _TorchGenerator(_on_cpu(device))


def _enter_autocast(self: torch.autocast) -> Any:
    """Autocast of CUDA is autocast of the CPU as well, which does the work."""
    if self.device == "cuda":
        self._on_host = torch.autocast("cpu", self.fast_dtype, self._enabled, self._cache_enabled)  # pyright: ignore[reportAttributeAccessIssue]
        _autocast_enter(self._on_host)  # pyright: ignore[reportAttributeAccessIssue]
    return _autocast_enter(self)


def _exit_autocast(self: torch.autocast, *error: Any) -> Any:
    done = _autocast_exit(self, *error)
    if self.device == "cuda":
        _autocast_exit(self._on_host, *error)  # pyright: ignore[reportAttributeAccessIssue]
    return done


_autocast_enter, _autocast_exit = torch.autocast.__enter__, torch.autocast.__exit__


def _always(value: Any) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def _mapped(function: Callable[..., Any], argument: str) -> Callable[..., Any]:
    """``function`` with its keyword ``argument`` on the CPU."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if argument in kwargs:
            kwargs[argument] = _on_cpu(kwargs[argument])
        return function(*args, **kwargs)

    return call


def _load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A checkpoint onto the host, also where it was written from a GPU and the caller names none."""
    onto_host = map_location is None or isinstance(map_location, dict) or _is_cuda(map_location)
    return _torch_load(f, _CPU if onto_host else map_location, *args, **kwargs)


_torch_load = torch.load


def _fork_rng(devices: Any = None, enabled: bool = True, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    """There is one generator, the host's, which is kept whatever the devices."""
    return _torch_fork_rng(devices=(), enabled=enabled)


_torch_fork_rng = torch.random.fork_rng


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """A backward pass within the mode: torch calls it with modes off, since ``Tensor.backward`` is a call that they have seen."""
    with _OnCpu():
        return _engine_run_backward(*args, **kwargs)


_engine_run_backward = torch.autograd._engine_run_backward  # pyright: ignore[reportPrivateImportUsage]


def _register_kernel(op: CustomOpDef, device_types: Any, fn: Any = None, /) -> Any:
    """Kernels of custom operators: one for CUDA serves the CPU where that has none, and all of them run within the mode, as backward passes do."""
    if fn is None:
        return functools.partial(_register_kernel, op, device_types)
    wanted = [device_types] if device_types is None or isinstance(device_types, str) else list(device_types)
    on_host = {name if name is None else _on_cpu(torch.device(name)).type for name in wanted}
    if "cuda" in wanted and "cpu" not in wanted and "cpu" in op._backend_fns:
        on_host.discard("cpu")

    @functools.wraps(fn)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _OnCpu() if torch.Generator is _Generator else nullcontext():
            return fn(*args, **kwargs)

    for name in on_host:
        _torch_register_kernel(op, name, kernel)
    return fn


_torch_register_kernel = CustomOpDef.register_kernel


def _context(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _triton_replacements() -> Iterator[tuple[Any, str, Any]]:
    """Where triton is installed: a kernel is not timed in each of its configurations, which means nothing in the interpreter; the last one serves.

    Triton up to 3.7 times a single configuration too, by a benchmarker that needs a driver.
    """
    if importlib.util.find_spec("triton") is not None:
        autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
        prune_configs = autotuner.prune_configs
        yield autotuner, "prune_configs", lambda self, *args, **kwargs: prune_configs(self, *args, **kwargs)[-1:]
        yield autotuner, "_bench", lambda self, *args, **kwargs: [0.0, 0.0, 0.0]


def _accelerator_replacements(constants: dict[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    """``torch.accelerator``, as far as this torch has it, answers as ``torch.cuda`` does. A build of torch for CUDA asks the driver otherwise."""
    values: dict[str, Any] = {
        **{name: lambda device=None: peak_memory() for name in _MEMORY_IN_USE},
        **{name: _always(value) for name, value in {"is_available": True, "current_accelerator": _CPU, "device_count": 1}.items()},
        **{name: _always(0) for name in ("current_device_index", "current_device_idx")},
        **{name: _always(None) for name in ("set_device_index", "set_device_idx", "set_stream", "synchronize", "empty_cache", "empty_host_cache")},
        **{name: _always(None) for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats")},
        "current_stream": _always(constants["current_stream"]),
        "device_index": _context,
        "get_device_capability": _always({"supported_dtypes": set(_DTYPES)}),
        "get_memory_info": lambda device=None: (installed_memory() - peak_memory(), installed_memory()),
        "memory_stats": lambda device=None: {},
        "Graph": _Graph,
    }
    accelerator = getattr(torch, "accelerator", None)
    for name, value in values.items():
        if hasattr(accelerator, name):
            yield accelerator, name, value


def _capturable_replacements() -> Iterator[tuple[Any, str, Any]]:
    """``capturable`` optimizers of torch keep to tensors, which the CPU does as well; each file of them has the list of devices as its own."""
    name = "_get_capturable_supported_devices"
    for module in [module for path, module in sys.modules.items() if path.startswith("torch.optim.") and hasattr(module, name)]:
        devices = getattr(module, name)
        yield module, name, lambda *args, devices=devices, **kwargs: [*devices(*args, **kwargs), "cpu"]


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """``(owner, name, value)`` of everything that is put in place."""
    generator = torch.default_generator
    properties = SimpleNamespace(
        name="CPU", major=_CAPABILITY[0], minor=_CAPABILITY[1], total_memory=installed_memory(), multi_processor_count=torch.get_num_threads()
    )
    constants = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": _CAPABILITY,
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "current_stream": _STREAM,
        "default_stream": _STREAM,
    }
    nothing = ["_lazy_init", "empty_cache", "init", "ipc_collect", "reset_peak_memory_stats", "set_device", "set_stream", "synchronize"]
    values: dict[str, Any] = {
        **{name: _always(value) for name, value in constants.items()},
        **{name: _always(None) for name in nothing},
        **{name: lambda device=None: peak_memory() for name in _MEMORY_IN_USE},
        "mem_get_info": lambda device=None: (installed_memory() - peak_memory(), installed_memory()),
        "Stream": _Stream,
        "Event": _Event,
        "stream": _context,
        "device": _context,
        "default_generators": (generator,),
        "initial_seed": generator.initial_seed,
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
    }
    for name, value in values.items():
        yield torch.cuda, name, value
    yield from _accelerator_replacements(constants)
    for name in ("range_push", "range_pop", "mark"):
        yield torch.cuda.nvtx, name, _always(0)
    yield torch.version, "cuda", _CUDA_VERSION
    yield torch, "Generator", _Generator
    yield CustomOpDef, "register_kernel", _register_kernel
    yield torch, "range", _mapped(torch.range, "device")
    yield torch, "load", _load
    yield torch.random, "fork_rng", _fork_rng
    yield torch.Tensor, "record_stream", _always(None)
    yield torch.Tensor, "pin_memory", _itself  # a loader's thread calls it, where no mode is in force
    yield torch.autocast, "__enter__", _enter_autocast
    yield torch.autocast, "__exit__", _exit_autocast
    yield torch.autograd, "_engine_run_backward", _run_backward
    yield torch.Tensor, "_make_wrapper_subclass", staticmethod(_mapped(torch.Tensor._make_wrapper_subclass, "device"))
    yield from _capturable_replacements()
    yield from _triton_replacements()
