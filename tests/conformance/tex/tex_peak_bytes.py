"""The memory that a call takes: every allocation of torch's CPU allocator, by its profiler; and the reference backend's bound on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tex_backends import REFERENCE
from torch.profiler import ProfilerActivity, profile

from fusible import tex

__all__ = ["check_peak", "peak_bytes", "wide_bytes"]


def check_peak(function: str, arguments: dict[str, Any]) -> None:
    """Fail where the reference holds more than three times the arguments and results of a call, counted in fp32, or does not serve it."""
    with tex.set_backend(REFERENCE.backend, strict=True):
        decision = tex.explain(function, **arguments)
    assert decision.backend is not None, decision.others  # the runner would skip the test
    most, result = peak_bytes(lambda: REFERENCE(function, **arguments))
    assert most <= 3 * wide_bytes(arguments, result) + 4096  # a few scalars and indices


def peak_bytes(call: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes that were allocated at one time during ``call``, its results included; and its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    events = profiler.profiler.kineto_results.experimental_event_tree()  # pyright: ignore[reportOptionalMemberAccess]
    changes = sorted((event.start_time_ns, event.extra_fields.alloc_size) for event in _all(events) if event.tag.name == "Allocation")
    now = most = 0
    for _, size in changes:
        now += size
        most = max(most, now)
    return most, result


def _all(events: Any) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all(event.children)


def wide_bytes(*values: Any) -> int:
    """What the distinct tensors in ``values`` (nested, and in the fields of quantized ones) would take in fp32."""
    seen: dict[int, int] = {}
    _collect(values, seen)
    return sum(seen.values())


def _collect(value: Any, seen: dict[int, int]) -> None:
    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter):
        address = value.data_ptr() or id(value)
        seen[address] = max(seen.get(address, 0), 4 * value.numel())
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _collect(inner, seen)
    elif isinstance(value, dict):
        _collect(list(value.values()), seen)
    else:
        for cls in type(value).__mro__:
            for name in getattr(cls, "__slots__", ()):
                if isinstance(inner := getattr(value, name, None), torch.Tensor):
                    _collect(inner, seen)
        _collect([inner for inner in getattr(value, "__dict__", {}).values() if isinstance(inner, torch.Tensor)], seen)
