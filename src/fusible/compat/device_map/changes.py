"""Replacements of what torch does not show to modes, for as long as the map is in force."""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from fusible.compat.device_map.compiling import compiling_replacements
from fusible.compat.device_map.cuda import always, cuda_replacements
from fusible.compat.device_map.distributed import distributed_replacements
from fusible.compat.device_map.mode import CPU, OnCpu, is_cuda, itself, on_cpu, without_cuda

__all__ = ["replacements"]

_CUDA_VERSION = "12.9"


class _AnyGenerator(type(torch.Generator)):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _TorchGenerator)


_TorchGenerator = torch.Generator


class _Generator(torch.Generator, metaclass=_AnyGenerator):
    """Makes generators of the host; every generator is an instance of it, as of the class whose place it takes."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _TorchGenerator(on_cpu(device))


_OF_BOTH = {"cuda": "cpu", "cpu": "cuda"}


def _enter_autocast(self: torch.autocast) -> Any:
    """Autocast of CUDA is autocast of the CPU, too, as that does the work; and the other way round, as scripts choose by a tensor's device."""
    if self.device in _OF_BOTH:
        self._on_other = torch.autocast(_OF_BOTH[self.device], self.fast_dtype, self._enabled, self._cache_enabled)  # pyright: ignore[reportAttributeAccessIssue]
        _autocast_enter(self._on_other)  # pyright: ignore[reportAttributeAccessIssue]
    return _autocast_enter(self)


def _exit_autocast(self: torch.autocast, *error: Any) -> Any:
    done = _autocast_exit(self, *error)
    if self.device in _OF_BOTH:
        _autocast_exit(self._on_other, *error)  # pyright: ignore[reportAttributeAccessIssue]
    return done


_autocast_enter, _autocast_exit = torch.autocast.__enter__, torch.autocast.__exit__


def _in_thread(thread: threading.Thread) -> None:
    """A thread that is started while the map is in force runs within the mode."""
    with OnCpu():
        _thread_bootstrap(thread)


_thread_bootstrap = threading.Thread._bootstrap_inner  # pyright: ignore[reportAttributeAccessIssue]


def _set_default_tensor_type(t: Any) -> None:
    _torch_set_default_tensor_type(without_cuda(t))


_torch_set_default_tensor_type = torch.set_default_tensor_type


def _mapped(function: Callable[..., Any], argument: str) -> Callable[..., Any]:
    """``function`` with its keyword ``argument`` on the CPU."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if argument in kwargs:
            kwargs[argument] = on_cpu(kwargs[argument])
        return function(*args, **kwargs)

    return call


def _load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A checkpoint onto the host, also where it was written from a GPU and the caller names none."""
    onto_host = map_location is None or isinstance(map_location, dict) or is_cuda(map_location)
    return _torch_load(f, CPU if onto_host else map_location, *args, **kwargs)


_torch_load = torch.load


def _fork_rng(devices: Any = None, enabled: bool = True, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    """There is one generator, the host's, which is kept whatever the devices."""
    return _torch_fork_rng(devices=(), enabled=enabled)


_torch_fork_rng = torch.random.fork_rng


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """A backward pass within the mode. Torch runs it with modes off, as they have seen the call of ``Tensor.backward`` already."""
    with OnCpu():
        return _engine_run_backward(*args, **kwargs)


_engine_run_backward = torch.autograd._engine_run_backward  # pyright: ignore[reportPrivateImportUsage]


def _register_kernel(op: CustomOpDef, device_types: Any, fn: Any = None, /) -> Any:
    """Register a kernel of a custom operator. One for CUDA also serves the CPU where that has none; all run in the mode, as backward passes do."""
    if fn is None:
        return functools.partial(_register_kernel, op, device_types)
    wanted = [device_types] if device_types is None or isinstance(device_types, str) else list(device_types)
    on_host = {name if name is None else on_cpu(torch.device(name)).type for name in wanted}
    if "cuda" in wanted and "cpu" not in wanted and "cpu" in op._backend_fns:
        on_host.discard("cpu")

    @functools.wraps(fn)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with OnCpu() if torch.Generator is _Generator else nullcontext():
            return fn(*args, **kwargs)

    for name in on_host:
        _torch_register_kernel(op, name, kernel)
    return fn


_torch_register_kernel = CustomOpDef.register_kernel


def _triton_replacements() -> Iterator[tuple[Any, str, Any]]:
    """Where triton is installed: a kernel is not timed in each of its configurations, which means nothing in the interpreter; the last one serves.

    Triton up to 3.7 times a single configuration too, by a benchmarker that needs a driver.
    """
    if importlib.util.find_spec("triton") is not None:
        autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
        prune_configs = autotuner.prune_configs
        yield autotuner, "prune_configs", lambda self, *args, **kwargs: prune_configs(self, *args, **kwargs)[-1:]
        yield autotuner, "_bench", lambda self, *args, **kwargs: [0.0, 0.0, 0.0]


def _capturable_replacements() -> Iterator[tuple[Any, str, Any]]:
    """``capturable`` optimizers of torch keep to tensors, which the CPU does as well; each file of them has the list of devices as its own."""
    name = "_get_capturable_supported_devices"
    for module in [module for path, module in sys.modules.items() if path.startswith("torch.optim.") and hasattr(module, name)]:
        devices = getattr(module, name)
        yield module, name, lambda *args, devices=devices, **kwargs: [*devices(*args, **kwargs), "cpu"]


def _by_the_one_device(self: torch.nn.DataParallel, *inputs: Any, **kwargs: Any) -> Any:
    """There is one device, and nothing to scatter."""
    return self.module(*inputs, **kwargs)


def replacements(capability: tuple[int, int]) -> Iterator[tuple[Any, str, Any]]:
    """``(owner, name, value)`` of everything that is put in place."""
    yield from cuda_replacements(capability)
    yield from distributed_replacements()
    yield from compiling_replacements()
    yield threading.Thread, "_bootstrap_inner", _in_thread
    yield torch, "set_default_tensor_type", _set_default_tensor_type
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        yield storage, "cuda", itself
    yield torch.version, "cuda", _CUDA_VERSION
    yield torch, "Generator", _Generator
    yield torch.nn.DataParallel, "forward", _by_the_one_device
    yield CustomOpDef, "register_kernel", _register_kernel
    yield torch, "range", _mapped(torch.range, "device")
    yield torch, "load", _load
    yield torch.random, "fork_rng", _fork_rng
    yield torch.Tensor, "record_stream", always(None)
    yield torch.Tensor, "pin_memory", itself  # a loader's thread calls it, where no mode is in force
    yield torch.autocast, "__enter__", _enter_autocast
    yield torch.autocast, "__exit__", _exit_autocast
    yield torch.autograd, "_engine_run_backward", _run_backward
    yield torch.Tensor, "_make_wrapper_subclass", staticmethod(_mapped(torch.Tensor._make_wrapper_subclass, "device"))
    yield from _capturable_replacements()
    yield from _triton_replacements()
