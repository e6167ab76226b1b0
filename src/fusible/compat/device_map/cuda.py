"""What ``torch.cuda`` and ``torch.accelerator`` answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from fusible.compat.device_map.mode import CPU
from fusible.errors import NotServedError, expected
from fusible.machine import installed_memory, peak_memory

__all__ = ["always", "cuda_replacements"]

_CAPABILITY = (9, 0)
"""The lowest for which NVIDIA's package has FP8 block scaling; FP8 data keeps its transposed copy beside it."""
_DTYPES = frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype))
_MEMORY_IN_USE = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


class _Stream:
    """A stream of work that is done when it is asked for."""

    cuda_stream = 0
    device = CPU
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


def always(value: Any) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def _context(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _accelerator_replacements(constants: dict[str, Any]) -> Iterator[tuple[Any, str, Any]]:
    """``torch.accelerator``, as far as this torch has it, answers as ``torch.cuda`` does. A build of torch for CUDA asks the driver otherwise."""
    values: dict[str, Any] = {
        **{name: lambda device=None: peak_memory() for name in _MEMORY_IN_USE},
        **{name: always(value) for name, value in {"is_available": True, "current_accelerator": CPU, "device_count": 1}.items()},
        **{name: always(0) for name in ("current_device_index", "current_device_idx")},
        **{name: always(None) for name in ("set_device_index", "set_device_idx", "set_stream", "synchronize", "empty_cache", "empty_host_cache")},
        **{name: always(None) for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats")},
        "current_stream": always(constants["current_stream"]),
        "device_index": _context,
        "get_device_capability": always({"supported_dtypes": set(_DTYPES)}),
        "get_memory_info": lambda device=None: (installed_memory() - peak_memory(), installed_memory()),
        "memory_stats": lambda device=None: {},
        "Graph": _Graph,
    }
    accelerator = getattr(torch, "accelerator", None)
    for name, value in values.items():
        if hasattr(accelerator, name):
            yield accelerator, name, value


def cuda_replacements() -> Iterator[tuple[Any, str, Any]]:
    """``(owner, name, value)`` of what answers in the place of ``torch.cuda`` and ``torch.accelerator``."""
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
        **{name: always(value) for name, value in constants.items()},
        **{name: always(None) for name in nothing},
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
        yield torch.cuda.nvtx, name, always(0)
