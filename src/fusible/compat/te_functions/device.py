"""What scripts ask of the device and of torch, and switches that change nothing here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch

from fusible import tex
from fusible.errors import NotServedError, expected

__all__ = [
    "CPLoadBalancingStrategy",
    "get_cudnn_version",
    "get_device_compute_capability",
    "is_bf16_available",
    "make_graphed_callables",
    "onnx_export",
    "torch_version",
]


class CPLoadBalancingStrategy(Enum):
    """How context parallelism shares the tokens of a sequence out: two chunks from both ends to each process, or one after the other."""

    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    NO_LOAD_BALANCE = "no_load_balance"


def get_cudnn_version() -> tuple[int, int, int]:
    """What ``tex`` tells of cuDNN's version: (major, minor, patch)."""
    encoded = tex.get_cudnn_version()
    major = 10000 if encoded >= 90000 else 1000
    return encoded // major, encoded % major // 100, encoded % 100


def get_device_compute_capability() -> tuple[int, int]:
    """The compute capability of the current CUDA device. Raises ``NotServedError`` where there is none."""
    if not torch.cuda.is_available():
        do = "ask for the formats that there are, by is_fp8_available() and the like, or run it by fusible run --device cpu"
        raise NotServedError(expected("a CUDA device", of="get_device_compute_capability", got="none", do=do))
    return torch.cuda.get_device_capability()


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether bf16 is computed: true, as the reference computes it everywhere; ``return_reason``: ``(True, "")``."""
    return (True, "") if return_reason else True


def torch_version() -> tuple[int, ...]:
    """The numbers of torch's version."""
    numbers = torch.__version__.partition("+")[0].split(".")
    return tuple(int(digits) for number in numbers if (digits := "".join(c for c in number[:4] if c.isdigit())))


@contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """A context that changes nothing: Fusible's modules are exported as they are (``fusible.pytorch.export``)."""
    yield


def make_graphed_callables(modules: Any, sample_args: Any, *, enabled: bool | None = None, recipe: Any = None, **options: Any) -> Any:
    """The callables as they are: nothing is captured here. ``enabled`` and ``recipe`` (``fp8_enabled``, ``fp8_recipe``) are refused
    (``NotServedError``): call them within ``autocast``. ``sample_args`` and other options are taken as they come."""
    if enabled or options.get("fp8_enabled"):
        do = "call the modules within te.autocast, and leave it out here"
        raise NotServedError(expected("enabled=False", of="make_graphed_callables", got=True, do=do))
    given: tuple[Callable[..., Any], ...] | Callable[..., Any] = modules
    return given
