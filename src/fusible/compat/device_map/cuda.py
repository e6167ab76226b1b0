"""What ``torch.cuda`` and ``torch.accelerator`` answer, name by name.

A name is *answered* (``_answers``), *refused* where a host has nothing that could stand for it (``REFUSED``), or left as torch has it, since it
asks no device (``LEFT``). Tests hold these three against all public names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from fusible.compat.device_map import streams
from fusible.compat.device_map.mode import CPU
from fusible.compat.device_map.places import everywhere, loaded
from fusible.errors import NotServedError, expected
from fusible.machine import installed_memory, peak_memory, reset_peak_memory, resident_memory

__all__ = ["LEFT", "REFUSED", "always", "cuda_replacements"]

Replacements = Iterator[tuple[Any, str, Any]]
"""``(owner, name, value)`` of what is put in place."""

_EAGERLY = "run the steps eagerly"
_BY_TORCH = "leave memory to torch"
_ONE_DEVICE = "use torch.distributed with processes of their own"
_NO_SENSORS = "read the host's own sensors"

REFUSED = {
    **dict.fromkeys(("CUDAGraph", "graph", "graph_pool_handle"), _EAGERLY),
    **dict.fromkeys(("CUDAPluggableAllocator", "MemPool", "use_mem_pool", "change_current_allocator"), _BY_TORCH),
    **dict.fromkeys(("caching_allocator_alloc", "caching_allocator_delete"), _BY_TORCH),
    **dict.fromkeys(("ExternalStream", "get_stream_from_external", "GreenContext", "green_contexts.SMPartition"), "use torch.cuda.Stream()"),
    **dict.fromkeys(("clock_rate", "power_draw", "temperature", "utilization", "memory_usage", "list_gpu_processes"), _NO_SENSORS),
    **dict.fromkeys(("current_blas_handle", "current_solver_handle"), "call torch's own functions"),
    **{f"comm.{name}": _ONE_DEVICE for name in ("broadcast", "broadcast_coalesced", "reduce_add", "reduce_add_coalesced", "scatter", "gather")},
    **{f"nccl.{name}": _ONE_DEVICE for name in ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter")},
    **{f"gds.{name}": "read files by torch.load" for name in ("gds_register_buffer", "gds_deregister_buffer", "GdsFile")},
    **{f"tunable.{name}": "ask torch.cuda.tunable.is_enabled()" for name in (
        "get_max_tuning_duration", "get_max_tuning_iterations", "get_filename", "get_results", "get_validators", "read_file", "tune_gemm_in_file",
        "mgpu_tune_gemm_in_file", "get_rotating_buffer_size", "get_cublaslt_requested_algo_count")},
}  # fmt: skip
"""Names of ``torch.cuda``, and what to do in their place."""

_HOOKS = ("capture_start", "capture_end", "instantiate", "replay_start", "replay_end", "destroy")
_OF_GRAPHS = ("export_dot", "export_graph_data", *(f"register_graph_{hook}_hook" for hook in _HOOKS))
_DTYPES = frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype))
LEFT = {
    **dict.fromkeys(("amp", "amp.autocast", "amp.custom_bwd", "amp.custom_fwd", "amp.GradScaler"), "torch.amp's, of which the map knows"),
    **dict.fromkeys(("amp.amp_definitely_not_available", "has_half", "has_magma"), "says how torch was built"),
    **dict.fromkeys(("CudaError", "DeferredCudaCallError", "cudaStatus"), "a class of errors"),
    **dict.fromkeys((*_OF_GRAPHS, *(f"graphs.{name}" for name in _OF_GRAPHS)), "says what to do with graphs, of which there are none"),
    **{f"graph_annotations.{name}": "of graphs, of which there are none" for name in (
        "clear_kernel_annotations", "dump_kernel_py_stacks", "get_kernel_annotations", "get_kernel_py_stacks")},
    **dict.fromkeys((
        "graph_annotations", "graphs", "jiterator", "memory", "nccl", "nvtx", "profiler", "random", "sparse", "streams", "tunable"), "a module"),
}  # fmt: skip
"""Names of ``torch.cuda`` that ask no device, and what they are."""


def always(value: Any) -> Callable[..., Any]:
    """A function that gives ``value`` whatever it is asked."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A new function that calls ``function``: torch's compiler tells functions by identity, so two names must not share one."""

    @functools.wraps(function)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return answer


def refused(name: str, do: str) -> type:
    """The replacement of a function or a class for which the host has no counterpart: calling it raises ``NotServedError``."""

    class Refused:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            raise NotServedError(expected("a GPU", of=name, got="the CPU in its place", do=do))

    return Refused


class _Device:
    """``torch.cuda.device(index)``: the one device is chosen already."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0

    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> None: ...


class _Counts(dict[str, int]):
    """Statistics of memory; what the host's allocator does not count is 0."""

    def __missing__(self, name: str) -> int:
        return 0


def _memory_stats(device: Any = None) -> _Counts:
    now = resident_memory()
    most = max(now, peak_memory())
    kinds = ("allocated_bytes", "active_bytes", "reserved_bytes", "requested_bytes")
    return _Counts({f"{kind}.all.{what}": value for kind in kinds for what, value in (("current", now), ("peak", most))})


def _nested(counts: Mapping[str, int]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in counts.items():
        *path, last = name.split(".")
        inner = nested
        for step in path:
            inner = inner.setdefault(step, {})
        inner[last] = value
    return nested


def _memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    return f"The host's memory, in the place of a GPU's: {resident_memory()} bytes in use, {peak_memory()} at most so far.\n"


def _left_of_memory(device: Any = None) -> tuple[int, int]:
    return installed_memory() - resident_memory(), installed_memory()


def _make_graphed_callables(callables: Any, *args: Any, **kwargs: Any) -> Any:
    """The callables as they are: what a graph replays, they compute."""
    return callables


def _devices(capability: tuple[int, int]) -> dict[str, Any]:
    name = "CPU"
    properties = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], total_memory=installed_memory(), multi_processor_count=torch.get_num_threads(),
        warp_size=32, is_integrated=True, is_multi_gpu_board=False,
    )  # fmt: skip
    values = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "is_tf32_supported": True,
        "is_current_stream_capturing": False,
        "can_device_access_peer": False,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": capability,
        "get_device_name": name,
        "get_device_properties": properties,
        "get_arch_list": [f"sm_{capability[0]}{capability[1]}"],
        "get_gencode_flags": "",
        "get_sync_debug_mode": 0,
        "check_error": None,
    }
    nothing = ("_lazy_init", "init", "ipc_collect", "set_device", "set_sync_debug_mode", "synchronize")
    return {
        **{name: always(value) for name, value in values.items()},
        **{name: always(None) for name in nothing},
        "device": _Device,
        "device_of": _Device,
        "cudart": always(SimpleNamespace(cudaProfilerStart=always(0), cudaProfilerStop=always(0), cudaMemGetInfo=_left_of_memory)),
    }


def _memory() -> dict[str, Any]:
    def now(device: Any = None) -> int:
        return resident_memory()

    def most(device: Any = None) -> int:
        return max(peak_memory(), resident_memory())  # the system adds up what is in memory now and then

    def forget_most(device: Any = None) -> None:
        reset_peak_memory()

    nothing = ("empty_cache", "caching_allocator_enable", "set_per_process_memory_fraction", "reset_accumulated_memory_stats")
    nothing_of_host = ("reset_accumulated_host_memory_stats", "reset_peak_host_memory_stats")
    return {
        **{name: _own(now) for name in ("memory_allocated", "memory_reserved", "memory_cached", "device_memory_used")},
        **{name: _own(most) for name in ("max_memory_allocated", "max_memory_reserved", "max_memory_cached")},
        **{name: _own(forget_most) for name in ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached")},
        **{name: always(None) for name in (*nothing, *nothing_of_host)},
        "caching_allocator_disabled": nullcontext,
        "get_allocator_backend": always("native"),
        "get_per_process_memory_fraction": always(1.0),
        "mem_get_info": _left_of_memory,
        "memory_stats": _memory_stats,
        "memory_stats_as_nested_dict": lambda device=None: _nested(_memory_stats()),
        "host_memory_stats": lambda: _Counts(),
        "host_memory_stats_as_nested_dict": dict,
        "memory_snapshot": lambda mempool_id=None, include_traces=True: [],
        "memory_summary": _memory_summary,
    }


def _random() -> dict[str, Any]:
    """The device's random generator is the host's."""
    generator = torch.default_generator

    def set_all(states: Any) -> None:
        for state in states:
            generator.set_state(state)

    def seed() -> None:
        generator.seed()

    def manual_seed(seed: int) -> None:
        generator.manual_seed(int(seed))

    return {
        "default_generators": (generator,),
        "initial_seed": lambda: generator.initial_seed(),
        **{name: _own(manual_seed) for name in ("manual_seed", "manual_seed_all")},
        **{name: _own(seed) for name in ("seed", "seed_all")},
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda new_state, device=None: generator.set_state(new_state) and None,
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state_all": set_all,
    }


def _types() -> dict[str, Any]:
    """``torch.cuda.FloatTensor`` and its like: the host's."""
    return {name: getattr(torch, name) for name in torch.cuda.__all__ if name.endswith(("Tensor", "Storage"))}


def _answers(capability: tuple[int, int]) -> dict[str, Any]:
    """The replacement of each name of ``torch.cuda``; a name in a submodule is written ``submodule.name``."""
    return {
        **_devices(capability),
        **_memory(),
        **_random(),
        **_types(),
        **{name: getattr(streams, name) for name in ("Stream", "Event", "StreamContext", "current_stream", "default_stream", "set_stream")},
        "stream": streams.StreamContext,
        "make_graphed_callables": _make_graphed_callables,
        **{f"nvtx.{name}": always(0) for name in ("range_push", "range_pop", "range_start", "range_end", "mark")},
        "nvtx.range": lambda msg, *args, **kwargs: nullcontext(),
        **{f"profiler.{name}": always(None) for name in ("init", "start", "stop")},
        "profiler.profile": nullcontext,
        "graph_annotations.is_available": always(False),
        "graph_annotations.mark_kernels": lambda annotation, *, backward=True: nullcontext(),
        "green_contexts.get_num_locality_domains": always(1),
        "green_contexts.is_localization_supported": always(False),
        "gds.is_available": always(False),
        **{f"tunable.{name}": always(False)
           for name in ("is_enabled", "tuning_is_enabled", "record_untuned_is_enabled", "wildcard_fallback_is_enabled")},
        "tunable.dynamic_dims_mask": lambda M=False, N=False, K=False, BATCH=False: nullcontext(),
        **{f"tunable.{name}": always(None) for name in ("enable", "tuning_enable", "record_untuned_enable",
           "set_max_tuning_duration",
           "set_max_tuning_iterations", "set_cublaslt_requested_algo_count", "wildcard_fallback_enable", "set_filename",
           "set_rotating_buffer_size", "set_numerical_check_tolerances")},
        "nccl.version": always((2, 0, 0)),
        "nccl.is_available": always(False),
        **{name: refused(f"torch.cuda.{name}", do) for name, do in REFUSED.items()},
    }  # fmt: skip


def cuda_replacements(capability: tuple[int, int]) -> Replacements:
    """``(owner, name, value)`` of all that is replaced in ``torch.cuda`` and ``torch.accelerator``."""
    answers = _answers(capability)
    for place in {f"torch.cuda.{name.rpartition('.')[0]}" for name in answers if "." in name}:
        if importlib.util.find_spec(place) is not None:
            importlib.import_module(place)
    modules = loaded("torch.cuda")
    for place, value in answers.items():
        inner, _, name = place.rpartition(".")
        owner = sys.modules.get(f"torch.cuda.{inner}" if inner else "torch.cuda")
        if owner is None or not hasattr(owner, name):
            continue
        former = getattr(owner, name)
        if place in REFUSED and hasattr(former, "__wrapped__"):
            value.__wrapped__ = former.__wrapped__  # torch's compiler tells functions by it
        yield from everywhere(modules, former, name, value)
    yield torch, "Stream", streams.AnyStream
    yield torch, "Event", streams.AnyEvent
    yield from _accelerator(answers)


def _accelerator(answers: Mapping[str, Any]) -> Replacements:
    """``torch.accelerator``, as far as this torch has it, answers as ``torch.cuda`` does. A build of torch for CUDA asks the driver otherwise."""
    same = (
        "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats", "is_available", "device_count",
        "empty_cache", "reset_peak_memory_stats", "reset_accumulated_memory_stats", "synchronize", "set_stream", "current_stream",
    )  # fmt: skip
    others = {
        "current_accelerator": always(CPU),
        **{name: always(0) for name in ("current_device_index", "current_device_idx")},
        **{name: always(None) for name in ("set_device_index", "set_device_idx", "empty_host_cache")},
        "device_index": _Device,
        "get_device_capability": always({"supported_dtypes": set(_DTYPES)}),
        "get_memory_info": _left_of_memory,
        "Graph": refused("torch.accelerator.Graph", _EAGERLY),
    }
    accelerator = getattr(torch, "accelerator", None)
    for name, value in {**{name: _own(answers[name]) for name in same}, **others}.items():
        if hasattr(accelerator, name):
            yield accelerator, name, value
