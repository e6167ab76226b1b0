"""The native backend: the compiled kernels of ``cppsrc``, on the host's CPU, where there is one."""

from __future__ import annotations

from typing import Any

import torch

from fusible import cpp_extensions
from fusible.tex.backends.cpu.activation import ActivationKernels
from fusible.tex.backends.cpu.attention import AttentionKernels
from fusible.tex.backends.cpu.blocks import FORMATS
from fusible.tex.backends.cpu.fingerprint import fingerprints
from fusible.tex.backends.cpu.gemm import GemmKernels
from fusible.tex.backends.cpu.grouped import GROUPED_PRODUCTS, GroupedKernels
from fusible.tex.backends.cpu.kernel_calls import native_program
from fusible.tex.backends.cpu.layouts import layouts, pattern
from fusible.tex.backends.cpu.normalization import NormalizationKernels
from fusible.tex.backends.cpu.operands import member_kinds
from fusible.tex.backends.cpu.optimizer import OptimizerKernels
from fusible.tex.backends.cpu.quantize import QuantizeKernels
from fusible.tex.backends.cpu.rope import RopeKernels
from fusible.tex.backends.cpu.softmax import SoftmaxKernels
from fusible.tex.backends.cpu.sums import SumKernels
from fusible.tex.enums import DType
from fusible.tex.formats import format_named
from fusible.tex.interface.activation import Activation
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import Request
from fusible.tex.interface.normalization import Normalization
from fusible.tex.selection.call_keys import Keys, compile_keys_by
from fusible.tex.selection.registry import registry

__all__ = ["CpuBackend", "compiled_keys", "fingerprints", "info", "layouts", "native_program", "pattern"]

_HANDS_ON = {*vars(Activation), "layernorm_fwd", "rmsnorm_fwd"}
"""Functions that serve quantizers of block formats, too: they write wide floats, and another backend quantizes these."""
_TAKES_BLOCKS = frozenset({"bgrad_group_quantize", "bgrad_quantize", "dequantize", "generic_gemm", "group_quantize", "quantize"}) | {
    "te_general_grouped_gemm",
    *GROUPED_PRODUCTS,
}
"""Functions that take the formats in blocks that the kernels know."""
_READS = frozenset({torch.float32, torch.float16, torch.bfloat16})
_READS_TOO = {
    "fp8_transpose": frozenset({torch.uint8}),
    "multi_tensor_adam_param_remainder": frozenset({torch.int16}),
    "multi_tensor_adam_scaled": frozenset({torch.int16, torch.uint8}),
}
"""Integers that functions read: codes, and words of numbers."""
_WRITES = _READS | {DType.kFloat32, DType.kFloat16, DType.kBFloat16}


@registry.register_backend
class CpuBackend(
    ActivationKernels,
    AttentionKernels,
    GemmKernels,
    GroupedKernels,
    NormalizationKernels,
    OptimizerKernels,
    QuantizeKernels,
    RopeKernels,
    SoftmaxKernels,
    SumKernels,
    TEXBackendBase,
):
    """C++ kernels for AVX2, AVX-512 and plain C++, chosen at run time."""

    NAME = "cpu"
    VENDOR = "Fusible"
    KIND = "own"
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


def compiled_keys(*described: Any) -> Keys | None:
    """Dispatch's keys by the extension, where it is there and torch has what it reads tensors by."""
    if not cpp_extensions.available or not cpp_extensions.has_exchange():
        return None
    made: Any = cpp_extensions.call_key(*described)
    return made


compile_keys_by(compiled_keys)


def _refused_kind(request: Request) -> str | None:
    for name, kind in request.kinds:
        if not isinstance(kind, tuple):
            if name == "quantizer" and kind is not None:
                return f"serves Float8 quantizers, and {name} is a {kind}"
            if name == "otype" and kind not in _WRITES and hasattr(Normalization, request.function):
                return f"writes float32, bfloat16 and float16, and otype is {kind}"
            continue
        for part in member_kinds(kind):
            form = format_named(part[0]) if len(part) == 3 else None
            if name == "quantizer" and form is not None and form.block_scaled and request.function in _HANDS_ON:
                continue
            if form in FORMATS and request.function in _TAKES_BLOCKS:
                continue
            if len(part) == 3 and (form is None or not form.per_tensor):
                return f"serves FP8 of delayed and current scaling, and {name} is {part[0]}"
            if len(part) == 3 and name == "tensor_lists":
                return f"reads plain tensors, and {name} has a {part[0]} one"
            if len(part) == 2 and part[1] not in _READS and part[1] not in _READS_TOO.get(request.function, ()):
                return f"reads float32, bfloat16 and float16, and {name} is {part[1]}"
    return None
