# ruff: noqa: F401, F403, F405, E501, A002, I001
"""Written by `make stub` from the declarations of fusible.tex.interface; their documentation is there."""

from collections.abc import Sequence
from typing import Any
from fusible.tex.interface.arguments import *
from fusible.tex.interface.domains import AnyDType, BooleanNumber, Count, Decay, Epsilon, FP8DType, Finite, FloatingDType, GivenDType, GivenTensor, Indices, Lengths, Limit, Positive, Probability, RealDType, Size
from fusible.tex.enums import *

def add(
    a: Tensor,
    b: Tensor,
    dtype: AnyDType | None = None,
) -> Any: ...
def all_gather(
    x: Tensor,
    group: Any = None,
) -> Any: ...
def all_reduce(
    x: Tensor,
    group: Any = None,
    reduction: str = 'sum',
) -> Any: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Lengths | None,
    cu_seqlens_kv: Lengths | None,
    page_table: Indices | None,
    seed: Tensor | None,
    max_seqlen_q: Size,
    max_seqlen_kv: Size,
    qkv_layout: NVTE_QKV_Layout,
    attn_mask_type: NVTE_Mask_Type,
    window_size: Sequence[int],
    scale: Finite,
    soft_cap: Positive | None,
    alibi_slopes: Sequence[float] | None,
    probability: Probability,
    offset: Size,
) -> tuple[Any, Any]: ...
def attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    stats: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Lengths | None,
    cu_seqlens_kv: Lengths | None,
    seed: Tensor | None,
    max_seqlen_q: Size,
    max_seqlen_kv: Size,
    qkv_layout: NVTE_QKV_Layout,
    attn_mask_type: NVTE_Mask_Type,
    window_size: Sequence[int],
    scale: Finite,
    soft_cap: Positive | None,
    alibi_slopes: Sequence[float] | None,
    probability: Probability,
    offset: Size,
) -> tuple[Any, Any, Any, Any]: ...
def cast(
    x: Tensor,
    dtype: AnyDType,
) -> Any: ...
def concatenate(
    tensors: Sequence[Tensor],
    dim: int,
) -> Any: ...
def copy(
    x: Tensor,
) -> Any: ...
def dropout(
    x: Tensor,
    probability: Probability,
    seed: Tensor,
    offset: Size,
) -> tuple[Any, Any]: ...
def dropout_backward(
    dy: Tensor,
    mask: Tensor,
    probability: Probability,
) -> Any: ...
def empty(
    shape: Shape,
    dtype: AnyDType,
    like: Tensor,
) -> Any: ...
def full(
    shape: Shape,
    value: float,
    dtype: AnyDType,
    like: Tensor,
) -> Any: ...
def layernorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]: ...
def pad_groups(
    x: Tensor,
    sizes: Tensor,
    multiple: Count,
) -> tuple[Any, Any]: ...
def permute(
    x: Tensor,
    dims: Sequence[int],
) -> Any: ...
def reduce_scatter(
    x: Tensor,
    group: Any = None,
) -> Any: ...
def reshape(
    x: Tensor,
    shape: Sequence[int],
) -> Any: ...
def rope_angles(
    positions: Size,
    width: Size,
    base: Positive,
    like: Tensor,
) -> Any: ...
def row_sum(
    x: Tensor,
    dtype: AnyDType | None = None,
) -> Any: ...
def scale(
    x: Tensor,
    factor: float,
    dtype: AnyDType | None = None,
) -> Any: ...
def split(
    x: Tensor,
    sizes: Shape,
    dim: int,
) -> list[Any]: ...
def transpose(
    x: Tensor,
) -> Any: ...
def unpad_groups(
    x: Tensor,
    sizes: Tensor,
    multiple: Count,
    rows: Size,
) -> Any: ...
