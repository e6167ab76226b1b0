"""The native backend: the compiled kernels of ``cppsrc``, on the host's CPU, where there is one."""

from __future__ import annotations

from typing import Any

import torch

from fusible import cpp_extensions
from fusible.tex.backends.cpu.activation import ActivationKernels
from fusible.tex.backends.cpu.gemm import GemmKernels
from fusible.tex.backends.cpu.normalization import NormalizationKernels
from fusible.tex.backends.cpu.quantize import QuantizeKernels
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import Request
from fusible.tex.registry import registry

__all__ = ["CpuBackend", "info"]

_READS = frozenset({torch.float32, torch.float16, torch.bfloat16})


@registry.register_backend
class CpuBackend(ActivationKernels, GemmKernels, NormalizationKernels, QuantizeKernels, TEXBackendBase):
    """C++ kernels for AVX2, AVX-512 and plain C++, chosen at run time."""

    NAME = "cpu"
    VENDOR = "Fusible"
    PRIORITY = 50
    DEVICES = frozenset({"cpu"})

    def unavailable(self) -> str | None:
        return None if cpp_extensions.available else cpp_extensions.reason

    def supports(self, request: Request) -> str | None:
        reason = super().supports(request)
        return reason if reason is not None else _refused_kind(request)


def info() -> dict[str, Any]:
    """What the native kernels are and run on, or why there are none: what ``cpp_extensions.info`` says."""
    return cpp_extensions.info()


def _refused_kind(request: Request) -> str | None:
    for name, kind in request.kinds:
        if not isinstance(kind, tuple):
            if name == "quantizer" and kind is not None:
                return f"serves Float8 quantizers, and {name} is a {kind}"
        elif len(kind) == 3 and kind[0] not in ("delayed", "current", "float8"):
            return f"serves FP8 of delayed and current scaling, and {name} is {kind[0]}"
        elif len(kind) == 2 and kind[1] not in _READS and not (request.function == "fp8_transpose" and kind[1] is torch.uint8):
            return f"reads float32, bfloat16 and float16, and {name} is {kind[1]}"
    return None
