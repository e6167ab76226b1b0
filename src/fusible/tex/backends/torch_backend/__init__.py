"""The reference backend: plain torch, on any device, the last in order."""

from __future__ import annotations

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
from fusible.tex.checks import BLOCK_SCALED, PER_TENSOR, refused_kind
from fusible.tex.interface.base import TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS, Request
from fusible.tex.memory_checks import writing_apart
from fusible.tex.registry import registry

__all__ = ["TorchBackend"]

_FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16})
_FORMATS = PER_TENSOR | BLOCK_SCALED


def _without_graphs(cls: type[TEXBackendBase]) -> type[TEXBackendBase]:
    for name in DECLARATIONS:
        method = getattr(cls, name)
        if method is not getattr(TEXBackendBase, name):
            declaration = DECLARATIONS[name]
            if declaration.apart or declaration.alone:
                method = writing_apart(method, declaration)
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
        return reason if reason is not None else refused_kind(request, _FLOATING, _FORMATS)
