"""Questions about the device and about torch, and switches that change nothing here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch

from fusible import tex
from fusible.compat.te_quantization import autocast
from fusible.compat.uncaptured import run_uncaptured
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
    """How context parallelism shards the tokens of a sequence: two chunks from both ends to each process, or one after the other."""

    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    NO_LOAD_BALANCE = "no_load_balance"


def get_cudnn_version() -> tuple[int, int, int]:
    """cuDNN's version, as ``tex`` reports it: (major, minor, patch)."""
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
    """A context that changes nothing: Fusible's modules are exported as they are (``fusible.export_onnx``)."""
    yield


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: bool | tuple[bool, ...] | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | tuple[bool, ...] | None = None,
    calibrating: bool | None = None,
    recipe: Any = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: list[int] | None = None,
    **options: Any,
) -> Any:
    """The modules, which compute eagerly within ``te.autocast`` by ``enabled`` and ``recipe``: nothing is captured here (``compat.uncaptured``).

    ``sample_args`` and options of the capture are taken as they come. ``fp8_...`` are former names of options of quantization.
    """
    return run_uncaptured(autocast, modules, locals())
