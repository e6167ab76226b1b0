"""The tex functions on lazy tensors: each records what it computes, and XLA compiles the whole program.

A lazy tensor is a handle to an immutable value. Where the interface writes into a given tensor, the handle is made to stand for the new value
(``lazy.Tensor.assign_``); a quantizer's ``amax`` attribute is set to its new value.
"""

from __future__ import annotations

import importlib.util

from fusible import lazy
from fusible.tex.backends.xla.activation import ActivationKernels
from fusible.tex.backends.xla.attention import AttentionKernels
from fusible.tex.backends.xla.dropout import DropoutKernels
from fusible.tex.backends.xla.gemm import GemmKernels
from fusible.tex.backends.xla.grouped import GroupedKernels
from fusible.tex.backends.xla.layout import LayoutKernels
from fusible.tex.backends.xla.normalization import NormalizationKernels
from fusible.tex.backends.xla.optimizer import OptimizerKernels
from fusible.tex.backends.xla.prim import PrimKernels
from fusible.tex.backends.xla.recipe import RecipeKernels
from fusible.tex.backends.xla.rope import RopeKernels
from fusible.tex.backends.xla.softmax import SoftmaxKernels
from fusible.tex.backends.xla.transpose import TransposeKernels
from fusible.tex.backends.xla.unserved import REASONS
from fusible.tex.calls.checks import refused_kind
from fusible.tex.formulas.quantize import QuantizeFormulas
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import Request
from fusible.tex.operands import register_kind
from fusible.tex.selection.registry import registry

__all__ = ["XlaBackend"]

_FLOATING = frozenset({lazy.float32, lazy.bfloat16, lazy.float16})


@registry.register_backend
class XlaBackend(
    ActivationKernels,
    AttentionKernels,
    DropoutKernels,
    GemmKernels,
    GroupedKernels,
    LayoutKernels,
    NormalizationKernels,
    OptimizerKernels,
    PrimKernels,
    QuantizeFormulas,
    RecipeKernels,
    RopeKernels,
    SoftmaxKernels,
    TransposeKernels,
    TEXBackendBase,
):
    """Functions on tensors that record. Of quantizing the formulas say it all."""

    NAME = "xla"
    VENDOR = "OpenXLA"
    KIND = "own"
    PRIORITY = 20
    DEVICES = frozenset({"lazy"})
    OWN_LAYOUTS = frozenset({"bgrad_group_quantize", "group_quantize"})

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("jaxlib") is None:
            return "jaxlib, which compiles what is recorded, is not installed: pip install 'fusible[xla]'"
        return None

    def lacks(self, function: str) -> str | None:
        return REASONS.get(function) or super().lacks(function)

    def supports(self, request: Request) -> str | None:
        reason = super().supports(request)
        if reason is None and "lazy" not in request.devices:
            reason = "serves tensors that record, and none is among the arguments"
        return reason if reason is not None else refused_kind(request, _FLOATING, "lazy")


def _kind(tensor: lazy.Tensor) -> tuple[str, lazy.dtype]:
    return "lazy", tensor.dtype


register_kind(lazy.Tensor, _kind)
