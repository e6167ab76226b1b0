"""The reference backend: plain torch, on any device, the last in order."""

from __future__ import annotations

from typing import Any

import torch

from fusible.tex.backends.torch_backend.activation import ActivationKernels
from fusible.tex.backends.torch_backend.as_kernels import as_kernel
from fusible.tex.backends.torch_backend.attention import AttentionKernels
from fusible.tex.backends.torch_backend.collectives import CollectiveKernels
from fusible.tex.backends.torch_backend.context_parallel import ContextParallelKernels
from fusible.tex.backends.torch_backend.dropout import DropoutKernels
from fusible.tex.backends.torch_backend.gemm import GemmKernels
from fusible.tex.backends.torch_backend.grouped import GroupedKernels
from fusible.tex.backends.torch_backend.layout import LayoutKernels
from fusible.tex.backends.torch_backend.moe import MoEKernels
from fusible.tex.backends.torch_backend.normalization import NormalizationKernels
from fusible.tex.backends.torch_backend.optimizer import OptimizerKernels
from fusible.tex.backends.torch_backend.platform import PlatformKernels
from fusible.tex.backends.torch_backend.prim import PrimKernels
from fusible.tex.backends.torch_backend.quantize import QuantizeKernels
from fusible.tex.backends.torch_backend.recipe import RecipeKernels
from fusible.tex.backends.torch_backend.rope import RopeKernels
from fusible.tex.backends.torch_backend.sharded_cast import ShardedCastKernels
from fusible.tex.backends.torch_backend.softmax import SoftmaxKernels
from fusible.tex.backends.torch_backend.swizzle import SwizzleKernels
from fusible.tex.backends.torch_backend.transpose import TransposeKernels
from fusible.tex.calls.checks import refused_kind, tensor_kinds
from fusible.tex.calls.memory_checks import writing_without_overlap
from fusible.tex.formats import format_named
from fusible.tex.interface.activation import Activation
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS, Request
from fusible.tex.interface.normalization import Normalization
from fusible.tex.selection.registry import registry

__all__ = ["TorchBackend"]

_FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16})
_OF_ONE_DTYPE = frozenset(
    (
        "fused_attn_bwd fused_attn_fwd fused_rope_backward fused_rope_forward generic_gemm prim_attention prim_attention_backward "
        "te_general_grouped_gemm_for_discrete_in te_general_grouped_gemm_for_discrete_out te_general_grouped_gemm_for_grouped_tensor"
    ).split()
)
"""Of these all operands that decide are of fp64, or none."""
_IN_DOUBLE = {*vars(Activation), *vars(Normalization), *_OF_ONE_DTYPE, "bgrad_group_quantize", "bgrad_quantize"}
"""What computes in fp64 where its operands are of it; so do the primitives."""


def _without_graphs(cls: type[TEXBackendBase]) -> type[TEXBackendBase]:
    for name in DECLARATIONS:
        method = getattr(cls, name)
        if method is not getattr(TEXBackendBase, name):
            declaration = DECLARATIONS[name]
            if declaration.disjoint or declaration.alone:
                method = writing_without_overlap(method, declaration)
            setattr(cls, name, as_kernel(method))
    return cls


@registry.register_backend
@_without_graphs
class TorchBackend(
    ActivationKernels,
    AttentionKernels,
    CollectiveKernels,
    ContextParallelKernels,
    DropoutKernels,
    GemmKernels,
    GroupedKernels,
    LayoutKernels,
    MoEKernels,
    NormalizationKernels,
    OptimizerKernels,
    PlatformKernels,
    PrimKernels,
    QuantizeKernels,
    RecipeKernels,
    RopeKernels,
    ShardedCastKernels,
    SoftmaxKernels,
    SwizzleKernels,
    TransposeKernels,
    TEXBackendBase,
):
    """Every function in torch operations: what all other backends are compared with."""

    NAME = "torch"
    VENDOR = "PyTorch"
    KIND = "reference"
    PRIORITY = 0
    REFERENCE = True

    def supports(self, request: Request) -> str | None:
        reason = super().supports(request)
        if reason is not None:
            return reason
        floating = _FLOATING | {torch.float64} if request.function in _IN_DOUBLE else _FLOATING
        return refused_kind(request, floating, "torch") or _refused_beside_double(request)


def _is_of_format(kind: tuple[Any, ...]) -> bool:
    return len(kind) == 3 and format_named(kind[0]) is not None


def _refused_beside_double(request: Request) -> str | None:
    """Why a request with operands in fp64 is refused for what else it has, or None."""
    kinds = [(name, kind) for name, tree in request.kinds for kind in tensor_kinds(tree)]
    double = next((name for name, kind in kinds if kind[-1] is torch.float64 and not _is_of_format(kind)), None)
    if double is None:
        return None
    for name, kind in kinds:
        if _is_of_format(kind):
            return f"quantizes nothing beside float64, and {double} is float64 where {name} is {kind[0]}"
        if request.function in _OF_ONE_DTYPE and kind[-1] is not torch.float64:
            return f"reads float64 beside float64 alone, and {double} is float64 where {name} is {kind[-1]}"
    return None
