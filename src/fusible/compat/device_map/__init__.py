"""Requests for a CUDA device, served by the CPU: every ``"cuda"`` that reaches torch becomes the CPU, and ``torch.cuda`` answers as if there were one
device.

All of it is in this room, and in force only within ``cuda_on_cpu()``. There are two means. A ``TorchFunctionMode`` sees every call into torch, and
maps the devices among its arguments (``mode``). What torch does not show to modes is replaced, and restored at the end: the functions of
``torch.cuda`` (``cuda``) and a few constructors (``changes``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fusible import knobs
from fusible.compat.device_map.changes import replacements
from fusible.compat.device_map.mode import OnCpu
from fusible.errors import ArgumentError, expected

__all__ = ["cuda_on_cpu"]


@contextmanager
def cuda_on_cpu(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Serve requests for a CUDA device by the CPU while the context is open, in this thread and those started in it.

    ``"cuda"``, ``"cuda:i"``, a device index, ``.cuda()`` and ``.to("cuda")`` mean the CPU; ``Tensor.is_cuda`` is true; ``torch.cuda`` says that there
    is one device, of compute ``capability`` (major, minor); streams, events and profiler ranges are there and do nothing but time; the random
    generator of the device is the host's; its memory is what the process has in memory; autocast of either device is that of both. What a host has
    nothing for, as CUDA graphs and memory pools, raises ``NotServedError`` when it is asked for. Triton kernels that are defined within the context
    run in Triton's interpreter. ``Tensor.device`` keeps telling the truth: ``cpu``.

    ``capability``: what NVIDIA's package chooses by. At 9.0, the least that has FP8 in blocks, its default recipe is delayed scaling, and FP8 data
    keeps a transposed copy beside it; from 10.0 on the default is MXFP8. Every format is there at each of them. Raises ``ArgumentError`` for another
    value than two whole numbers.
    """
    if not (isinstance(capability, tuple) and len(capability) == 2 and all(type(part) is int and part >= 0 for part in capability)):
        raise ArgumentError(expected("(major, minor)", of="capability of cuda_on_cpu", got=repr(capability), do="pass (9, 0) or (10, 0)"))
    with ExitStack() as stack:
        stack.enter_context(knobs.setting(TRITON_INTERPRET="1"))
        for owner, name, value in replacements(capability):
            stack.enter_context(_replaced(owner, name, value))
        stack.enter_context(OnCpu())
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
