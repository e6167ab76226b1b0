"""What NVIDIA's package has beside modules and operations: permutations, losses, padding, optimizers, random states, offloading, the device."""

from __future__ import annotations

import inspect

import torch

from fusible.compat.te_functions.cross_entropy import parallel_cross_entropy
from fusible.compat.te_functions.device import (
    CPLoadBalancingStrategy,
    get_cudnn_version,
    get_device_compute_capability,
    is_bf16_available,
    make_graphed_callables,
    onnx_export,
    torch_version,
)
from fusible.compat.te_functions.offload import ManualOffloadSynchronizer, get_cpu_offload_context, mark_not_offload
from fusible.compat.te_functions.optimizers import FusedAdam, FusedSGD, MultiTensorApply, multi_tensor_applier
from fusible.compat.te_functions.orthogonalization import (
    CusolverMpCtx,
    get_coefficient_iterator,
    get_coefficients,
    newton_schulz,
    newton_schulz_tp,
)
from fusible.compat.te_functions.padding import Fp8Padding, Fp8Unpadding
from fusible.compat.te_functions.permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from fusible.compat.te_functions.random_states import CudaRNGStatesTracker
from fusible.compat.te_overlap import UserBufferQuantizationMode, destroy_ub, initialize_ub
from fusible.tex.calls.argument_kinds import kind_of
from fusible.tex.calls.functions import checked

__all__ = [
    "CPLoadBalancingStrategy",
    "CudaRNGStatesTracker",
    "CusolverMpCtx",
    "Fp8Padding",
    "Fp8Unpadding",
    "FusedAdam",
    "FusedSGD",
    "ManualOffloadSynchronizer",
    "MultiTensorApply",
    "UserBufferQuantizationMode",
    "destroy_ub",
    "get_coefficient_iterator",
    "get_coefficients",
    "get_cpu_offload_context",
    "get_cudnn_version",
    "get_device_compute_capability",
    "initialize_ub",
    "is_bf16_available",
    "make_graphed_callables",
    "mark_not_offload",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "multi_tensor_applier",
    "newton_schulz",
    "newton_schulz_tp",
    "onnx_export",
    "parallel_cross_entropy",
    "torch_version",
]

_KINDS = {"Tensor": kind_of("torch.Tensor", {})}
_EXACT = {"Tensor": frozenset({torch.Tensor, torch.nn.Parameter})}
for _name in __all__:
    if inspect.isfunction(globals()[_name]):
        globals()[_name] = checked(globals()[_name], known=_KINDS, exact=_EXACT, module=__name__)
