"""Why the xla backend does not serve some functions, as phrases for error messages."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.tex.interface.context_parallel import ContextParallel
from fusible.tex.interface.declare import DECLARATIONS
from fusible.tex.interface.moe import MoE
from fusible.tex.interface.platform import Platform
from fusible.tex.interface.prim import COLLECTIVES
from fusible.tex.interface.sharded_cast import ShardedCast
from fusible.tex.interface.swizzle import Swizzle

__all__ = ["REASONS"]

_WITHOUT_TENSORS = "serves calls on tensors that record, and this one takes none"
_OF_EXPERTS = "compiles programs that do the same whatever the values, and this moves rows to where a router's values send them"
_CATEGORIES: dict[type, str] = {
    ContextParallel: "compiles programs of one process, and this is a step of attention over the parts that several have of a sequence",
    MoE: _OF_EXPERTS,
    Platform: _WITHOUT_TENSORS,
    ShardedCast: "compiles programs of one process, and this is a step of casting weights that are sharded over several",
    Swizzle: "multiplies by scales in the order in which it makes them, and leaves that of tensor cores to calls on real tensors",
}
"""Of whole categories of the interface."""

_FUNCTIONS: dict[str, Sequence[str]] = {
    _WITHOUT_TENSORS: (
        "bulk_allocate",
        "create_empty_quantized_tensor",
        "get_fused_attn_backend",
        "get_grouped_gemm_setup_workspace_size",
    ),
    _OF_EXPERTS: ("prim_put_along", "prim_take_along"),
    "compiles programs of one process, and it takes those of a group": COLLECTIVES,
    "records values, which have no place in memory, and this reads or gives one": (
        "copy_data_ptrs_to_device",
        "fa_prepare_fwd",
        "swizzle_scales_and_pack_ptrs_for_discrete_weights",
    ),
    "serves what operations and optimizers of Fusible record, and none of them calls this": (
        "fa_prepare_bwd",
        "fused_multi_row_padding",
        "fused_multi_row_unpadding",
        "fused_qkv_rope_backward",
        "fused_qkv_rope_forward",
        "group_requantize_inplace",
        "group_scaled_clamped_swiglu",
        "group_scaled_swiglu",
        "multi_tensor_pad_last_dim",
        "multi_tensor_transpose_to_bhsd",
        "nvfp4_group_quantize_with_amax",
    ),
}
"""Of single functions."""

_OF_CATEGORIES = {name: reason for category, reason in _CATEGORIES.items() for name in vars(category) if name in DECLARATIONS}
_OF_FUNCTIONS = {name: reason for reason, functions in _FUNCTIONS.items() for name in functions}
REASONS: dict[str, str] = {name: reason for name, reason in (_OF_CATEGORIES | _OF_FUNCTIONS).items() if DECLARATIONS[name].unserved is None}
"""Of each function that other backends of this package serve: why this one does not, as a phrase after "it"."""
