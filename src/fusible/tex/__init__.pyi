# ruff: noqa: F401, F403, F405, E501, A002, I001
"""Written by `make stub` from the declarations of fusible.tex.interface; their documentation is there."""

from collections.abc import Sequence
from typing import Any
from fusible.tex.interface.arguments import *
from fusible.tex.interface.domains import AnyDType, BooleanNumber, Count, Decay, Epsilon, FP8DType, Finite, FloatingDType, GivenDType, GivenTensor, Indices, Lengths, Limit, Positive, Probability, RealDType, Size
from fusible.tex.enums import *

from fusible.tex import backends as backends, classes as classes, enums as enums, grouped_mlp_experimental as grouped_mlp_experimental, prim as prim
from fusible.tex.classes import *
from fusible.tex.enums import *
from fusible.tex.factories import build_quantized as build_quantized, register_factory as register_factory
from fusible.tex.interface.base import TEXBackendBase as TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS as DECLARATIONS, Request as Request, function as function, requires as requires
from fusible.tex.operands import register_kind as register_kind
from fusible.tex.registry import Decision as Decision, registry as registry
from fusible.tex.selection.dispatch import Call as Call, dispatcher as dispatcher, explain as explain, hand_over as hand_over, record as record
from fusible.tex.selection.extend import declare as declare, implement as implement, undeclare as undeclare
from fusible.tex.selection.implementations import BackendImplKind as BackendImplKind, BackendPriority as BackendPriority, OpImpl as OpImpl
from fusible.tex.selection.management import coverage as coverage, get_backend as get_backend, get_policy as get_policy, list_backends as list_backends, register_backend as register_backend, set_backend as set_backend, set_policy as set_policy
from fusible.tex.selection.policy import Policy as Policy
from fusible.tex.selection.taping import Heard as Heard, listening as listening
from fusible import tex as tex

def bgrad_group_quantize(
    tensor: Tensor,
    quantizer: Quantizer | None,
    num_tensors: Count,
    first_dims: Tensor | None,
    last_dims: Tensor | None = None,
    tensor_offsets: Tensor | None = None,
) -> Any: ...
def bgrad_quantize(
    input: Tensor,
    quantizer: Quantizer | None,
) -> list[Any]: ...
def bulk_allocate(
    shapes: Sequence[Shape],
    dtypes: Sequence[DTypeLike],
    device: Device | None = None,
    alignments: Sequence[int] | None = None,
) -> list[Any]: ...
def bulk_overlap_ag_with_external_gemm(
    allgather_communicator: Any,
    send_stream: Any,
    recv_stream: Any,
) -> None: ...
def clamped_dswiglu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
    limit: Limit = 7.0,
    alpha: Finite = 1.702,
    glu_linear_offset: Finite = 1.0,
) -> Any: ...
def clamped_swiglu(
    input: Tensor,
    quantizer: Quantizer | None,
    limit: Limit = 7.0,
    alpha: Finite = 1.702,
    glu_linear_offset: Finite = 1.0,
) -> Any: ...
def compute_amax(
    input: Tensor,
    amax: Tensor,
) -> None: ...
def convert_bshd_to_thd(
    tensor: Tensor,
    cu_seqlens: Lengths,
    t: Size,
) -> Any: ...
def convert_thd_to_bshd(
    tensor: Tensor,
    cu_seqlens: Lengths,
    b: Size,
    max_seq_len: Size,
) -> Any: ...
def copy_data_ptrs_to_device(
    tensors: Sequence[Tensor],
    device: Device,
) -> Any: ...
def copy_to_kv_cache(
    new_k: Tensor,
    new_v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Indices | None,
    cu_new_lens: Lengths,
    cu_cached_lens: Lengths,
    kv_format: NVTE_QKV_Format,
    b: Size,
    max_ctx_len: Size,
    max_seq_len: Size,
    max_pages_per_seq: Size,
    is_non_paged: bool,
) -> None: ...
def create_empty_quantized_tensor(
    quantizer: Quantizer | None,
    shape: Shape,
    dtype: DTypeLike,
    device: Device,
    pin_memory: bool,
) -> Any: ...
def create_nvshmem_tensor(
    shape: Sequence[int],
    dtype: DTypeLike,
) -> Any: ...
def cusolvermp_ctx_create(
    nccl_comm_ptr: int,
    nranks: int,
    rank: int,
) -> int: ...
def cusolvermp_ctx_destroy(
    ctx_ptr: int,
) -> None: ...
def dbias_dgelu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
) -> list[Any]: ...
def dbias_dqgelu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
) -> list[Any]: ...
def dbias_drelu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
) -> list[Any]: ...
def dbias_dsilu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
) -> list[Any]: ...
def dbias_dsrelu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
) -> list[Any]: ...
def dequantize(
    input: QuantizedTensor,
    otype: FloatingDType,
) -> Any: ...
def device_supports_multicast(
    device_id: int = -1,
) -> bool: ...
def dgeglu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def dgelu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def dglu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def dqgeglu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def dqgelu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def dreglu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def drelu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def dropout_bwd(
    grad_output: Tensor,
    mask: Tensor,
    dropout_probability: Probability,
    grad_input: Tensor | None = None,
) -> Any: ...
def dropout_fwd(
    input: Tensor,
    dropout_probability: Probability,
    out: Tensor | None = None,
) -> list[Any]: ...
def dsilu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def dsituglu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
    beta1: Positive = 4.0,
    beta2: Positive = 25.0,
) -> Any: ...
def dsreglu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def dsrelu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def dswiglu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def ep_combine(
    handle_mem: Tensor,
    expert_out: Tensor,
    result: Tensor,
) -> None: ...
def ep_combine_bwd(
    handle_mem: Tensor,
    grad: Tensor,
    grad_expert_out: Tensor,
    grad_scale_inv: Tensor | None = None,
    grad_expert_out_scale_inv: Tensor | None = None,
) -> None: ...
def ep_dispatch(
    handle_mem: Tensor,
    topk_idx: Tensor,
    tokens: Tensor,
    topk_weights: Tensor,
    recv_tokens: Tensor | None,
    recv_topk_weights: Tensor | None,
    tokens_scale_inv: Tensor | None = None,
    recv_scale_inv: Tensor | None = None,
) -> None: ...
def ep_dispatch_bwd(
    handle_mem: Tensor,
    grad: Tensor,
    g_recv_topk_weights: Tensor,
    grad_tokens: Tensor,
    grad_topk_weights: Tensor,
) -> None: ...
def ep_finalize() -> None: ...
def ep_get_zero_copy() -> bool: ...
def ep_handle_mem_size(
    top_k: int,
    dispatch_output_per_expert_alignment: int = 0,
) -> int: ...
def ep_initialize(
    comm_ptr: int,
    group_name: str,
    num_experts: int,
    max_tokens_per_rank: int,
    max_recv_tokens_per_rank: int,
    hidden_dim: int,
    max_num_sms: int = 0,
    max_token_dtype: GivenDType = None,
    zero_copy: bool = False,
    num_topk: int = 0,
    drop_on_overflow: bool = False,
) -> None: ...
def ep_prepare(
    handle_mem: Tensor,
    topk_idx: Tensor,
    tokens_per_expert: Tensor,
    top_k: int,
    dispatch_output_per_expert_alignment: int,
    total_recv_tokens: Tensor,
) -> None: ...
def ep_prepare_and_dispatch(
    handle_mem: Tensor,
    topk_idx: Tensor,
    tokens: Tensor,
    topk_weights: Tensor,
    tokens_per_expert: Tensor,
    total_recv_tokens: Tensor,
    top_k: int,
    dispatch_output_per_expert_alignment: int,
    recv_tokens: Tensor | None = None,
    recv_topk_weights: Tensor | None = None,
    recv_scale_inv: Tensor | None = None,
    tokens_scale_inv: Tensor | None = None,
) -> list[Any]: ...
def ep_zero_copy_supported() -> bool: ...
def fa_prepare_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Any: ...
def fa_prepare_fwd(
    qkvi: Tensor,
) -> Any: ...
def fp8_block_scaling_compute_partial_amax(
    tensor: Tensor,
    amax: Tensor,
    h: Size,
    w: Size,
    start_offset: Size,
    block_len: Count,
) -> None: ...
def fp8_block_scaling_partial_cast(
    inp: Tensor,
    out: Tensor,
    scale: Tensor,
    h: Size,
    w: Size,
    start_offset: Size,
    block_len: Count,
    out_dtype: FP8DType,
) -> None: ...
def fp8_transpose(
    input: Tensor,
    dtype: FP8DType,
    *,
    out: Tensor | None,
) -> Any: ...
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: Sequence[Tensor],
    scales: Sequence[Tensor],
    amax_compute_algo: str,
    fp8_dtype: FP8DType,
    margin: Finite,
) -> None: ...
def fused_attn_bwd(
    max_seqlen_q: Size,
    max_seqlen_kv: Size,
    attn_scale: Finite,
    p_dropout: Probability,
    set_zero: bool,
    qkv_layout: NVTE_QKV_Layout,
    o_format: NVTE_QKV_Format,
    do_format: NVTE_QKV_Format,
    dqkv_layout: NVTE_QKV_Layout,
    qkv_scale_inv_format: NVTE_QKV_Format,
    do_scale_inv_format: NVTE_QKV_Format,
    bias_type: NVTE_Bias_Type,
    attn_mask_type: NVTE_Mask_Type,
    softmax_type: NVTE_Softmax_Type,
    window_size: Sequence[int],
    bottom_right_diagonal: bool,
    deterministic: bool,
    cu_seqlens_q: Lengths | None,
    cu_seqlens_kv: Lengths | None,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,
    dO: Tensor,
    fake_dtype: RealDType,
    Aux_CTX_Tensors: Sequence[Tensor],
    cu_seqlens_q_padded: Lengths | None,
    cu_seqlens_kv_padded: Lengths | None,
    s_quantizer: Quantizer | None,
    dp_quantizer: Quantizer | None,
    dqkv_quantizer: Quantizer | None,
    cuda_graph: bool,
) -> list[Any]: ...
def fused_attn_fwd(
    max_seqlen_q: Size,
    max_seqlen_kv: Size,
    is_training: bool,
    attn_scale: Finite,
    p_dropout: Probability,
    set_zero: bool,
    qkv_layout: NVTE_QKV_Layout,
    o_format: NVTE_QKV_Format,
    qkv_scale_inv_format: NVTE_QKV_Format,
    bias_type: NVTE_Bias_Type,
    attn_mask_type: NVTE_Mask_Type,
    softmax_type: NVTE_Softmax_Type,
    window_size: Sequence[int],
    bottom_right_diagonal: bool,
    cu_seqlens_q: Lengths | None,
    cu_seqlens_kv: Lengths | None,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    fake_dtype: RealDType,
    cu_seqlens_q_padded: Lengths | None,
    cu_seqlens_kv_padded: Lengths | None,
    page_table_k: Indices | None,
    page_table_v: Indices | None,
    s_quantizer: Quantizer | None,
    o_quantizer: Quantizer | None,
    Bias: Tensor | None,
    SoftmaxOffset: Tensor | None,
    rng_gen: Generator | None,
    rng_elts_per_thread: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> list[Any]: ...
def fused_moe_aux_loss_bwd(
    Const_buf: Tensor,
    tokens_per_expert: Tensor,
    num_rows: Size,
    num_cols: Size,
    grad_aux_loss: Tensor,
) -> Any: ...
def fused_moe_aux_loss_fwd(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Count,
    num_experts: Count,
    num_rows: Size,
    num_cols: Size,
    topk: Count,
    coeff: Finite,
) -> Any: ...
def fused_moe_aux_loss_fwd_graph_safe(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: Tensor,
    num_experts: Count,
    num_rows: Size,
    num_cols: Size,
    topk: Count,
    coeff: Finite,
) -> Any: ...
def fused_multi_row_padding(
    input: Tensor,
    output: Tensor,
    input_row_list: Sequence[int],
    padded_input_row_list: Sequence[int],
) -> None: ...
def fused_multi_row_unpadding(
    input: Tensor,
    output: Tensor,
    input_row_list: Sequence[int],
    unpadded_input_row_list: Sequence[int],
) -> None: ...
def fused_qkv_rope_backward(
    q_grad_out: Tensor,
    k_grad_out: Tensor,
    v_grad_out: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: Sequence[int],
    qkv_format: NVTE_QKV_Format,
    interleaved: bool,
    cp_size: Count,
    cp_rank: Size,
) -> Any: ...
def fused_qkv_rope_forward(
    qkv_input: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    start_positions: Lengths | None,
    qkv_split_arg_list: Sequence[int],
    qkv_format: NVTE_QKV_Format,
    interleaved: bool,
    cp_size: Count,
    cp_rank: Size,
) -> Any: ...
def fused_rope_backward(
    output_grads: Tensor,
    freqs: Tensor,
    start_positions: Lengths | None,
    qkv_format: NVTE_QKV_Format,
    interleaved: bool,
    cu_seqlens: Lengths | None,
    cp_size: Count,
    cp_rank: Size,
) -> Any: ...
def fused_rope_forward(
    input: Tensor,
    freqs: Tensor,
    start_positions: Lengths | None,
    qkv_format: NVTE_QKV_Format,
    interleaved: bool,
    cu_seqlens: Lengths | None,
    cp_size: Count,
    cp_rank: Size,
) -> Any: ...
def fused_score_for_moe_aux_loss_bwd(
    intermediate_output: Tensor,
    grad_scores: Tensor,
    grad_logits: Tensor,
    topk: Count,
    score_function: str,
) -> None: ...
def fused_score_for_moe_aux_loss_fwd(
    logits: Tensor,
    topk: Count,
    score_function: str,
    routing_map_format: NVTERoutingMapFormat | int = 0,
) -> Any: ...
def fused_topk_with_score_function_bwd(
    routing_map: Tensor,
    intermediate_output: Tensor,
    grad_probs: Tensor,
    grad_logits: Tensor,
    topk: Count,
    use_pre_softmax: bool,
    scaling_factor: Finite | None,
    score_function: str,
    use_dense_indices: bool = False,
    routing_map_format: NVTERoutingMapFormat | int = 0,
) -> None: ...
def fused_topk_with_score_function_fwd(
    logits: Tensor,
    topk: Count,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: Finite | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: NVTERoutingMapFormat | int = 0,
    topk_indices: Tensor | None = None,
) -> Any: ...
def fused_topk_with_score_function_qb_fwd(
    logits: Tensor,
    topk: Count,
    scaling_factor: Finite | None,
    expert_bias: Tensor | None,
    routing_map_format: NVTERoutingMapFormat,
    topk_indices: Tensor | None,
    histogram: Tensor,
    bin_bounds: Tensor,
    histogram_mode: NVTEQBHistogramMode,
    bin_bounds_validated: bool = False,
) -> Any: ...
def geglu(
    input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def gelu(
    input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def generic_gemm(
    A: Tensor,
    transA: bool,
    B: Tensor,
    transB: bool,
    D: Tensor | None,
    quantizer: Quantizer | None,
    output_dtype: RealDType | None,
    bias: Tensor | None,
    bias_type: RealDType | None,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor | None,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: CommOverlapType | None = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: Finite = 1.0,
    beta: Finite | None = None,
) -> list[Any]: ...
def get_cublasLt_version() -> int: ...
def get_cudnn_version() -> int: ...
def get_fused_attn_backend(
    fused_attn_params: Any = None,
    *arguments: Any,
    **named: Any,
) -> Any: ...
def get_grouped_gemm_setup_workspace_size(
    num_tensors: Count,
) -> int: ...
def get_num_cublas_streams() -> int: ...
def get_stream_priority_range(
    device_id: int = -1,
) -> tuple[int, int]: ...
def glu(
    input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def group_dequantize(
    input: GroupedTensor,
    otype: FloatingDType,
) -> Any: ...
def group_quantize(
    tensor: Tensor,
    quantizer: Quantizer | None,
    num_tensors: Count,
    first_dims: Tensor | None,
    last_dims: Tensor | None = None,
    tensor_offsets: Tensor | None = None,
    noop_flag: Tensor | None = None,
    output: GroupedTensor | None = None,
) -> Any: ...
def group_requantize_inplace(
    grouped_x: GroupedTensor,
    quantizer: Quantizer,
    num_tensors: Count,
    first_dims: Tensor | None,
    otype: FloatingDType,
    tensor_offsets: Tensor | None = None,
    return_dequantized: bool = False,
) -> Any: ...
def group_scaled_clamped_swiglu(
    input_2h: Tensor,
    prob: Tensor,
    quantizer: Quantizer | None,
    num_tensors: Count,
    limit: Positive,
    alpha: Finite = 1.702,
    glu_linear_offset: Finite = 1.0,
    first_dims: Tensor | None = None,
    last_dims: Tensor | None = None,
    tensor_offsets: Tensor | None = None,
) -> Any: ...
def group_scaled_swiglu(
    input_2h: Tensor,
    prob: Tensor,
    quantizer: Quantizer | None,
    num_tensors: Count,
    first_dims: Tensor | None = None,
    last_dims: Tensor | None = None,
    tensor_offsets: Tensor | None = None,
) -> Any: ...
def grouped_swizzle_for_gemm(
    tensor: GroupedTensor,
    rowwise: bool,
    columnwise: bool,
) -> None: ...
def init_nvshmem_backend(
    process_group: Any,
) -> None: ...
def layernorm_bwd(
    dz: Tensor,
    x: Tensor,
    mu: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]: ...
def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: Epsilon,
    ln_out: Tensor | None,
    quantizer: Quantizer | None,
    otype: RealDType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]: ...
def moe_permute_bwd(
    input: Tensor,
    dtype: AnyDType,
    row_id_map: Tensor,
    prob: Tensor | None,
    num_tokens: Size,
    topK: Count,
) -> Any: ...
def moe_permute_fwd(
    input: Tensor,
    dtype: AnyDType,
    indices: Tensor,
    num_out_tokens: int,
    workspace: list[Tensor],
    max_expanded_token_num: int,
) -> Any: ...
def moe_unpermute_bwd(
    input_bwd: Tensor,
    input_fwd: Tensor,
    dtype: AnyDType,
    row_id_map: Tensor,
    prob: Tensor,
) -> Any: ...
def moe_unpermute_fwd(
    input: Tensor,
    dtype: AnyDType,
    row_id_map: Tensor,
    prob: Tensor | None,
    num_tokens: Size,
    topK: Count,
) -> Any: ...
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: Finite,
    beta1: Decay,
    beta2: Decay,
    epsilon: Epsilon,
    step: Size,
    mode: BooleanNumber,
    bias_correction: BooleanNumber,
    weight_decay: Finite,
) -> None: ...
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: Tensor,
    beta1: Decay,
    beta2: Decay,
    epsilon: Epsilon,
    step: Tensor,
    mode: BooleanNumber,
    bias_correction: BooleanNumber,
    weight_decay: Finite,
    inv_scale: Tensor,
) -> None: ...
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: Tensor,
    beta1: Decay,
    beta2: Decay,
    epsilon: Epsilon,
    step: Tensor,
    mode: BooleanNumber,
    bias_correction: BooleanNumber,
    weight_decay: Finite,
    inv_scale: Tensor,
) -> None: ...
def multi_tensor_adam_fp8(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: Finite,
    beta1: Decay,
    beta2: Decay,
    epsilon: Epsilon,
    step: Size,
    mode: BooleanNumber,
    bias_correction: BooleanNumber,
    weight_decay: Finite,
    fp8_dtype: FP8DType,
) -> None: ...
def multi_tensor_adam_param_remainder(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: Finite,
    beta1: Decay,
    beta2: Decay,
    epsilon: Epsilon,
    step: Size,
    mode: BooleanNumber,
    bias_correction: BooleanNumber,
    weight_decay: Finite,
) -> None: ...
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    max_fp8: Positive,
    force_pow_2_scales: bool,
    epsilon: Epsilon,
) -> None: ...
def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int,
    dummy: Any,
    tensor_lists: Sequence[Sequence[Tensor]],
) -> None: ...
def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    per_tensor_python: bool | None,
) -> tuple[Any, Any]: ...
def multi_tensor_pad_last_dim(
    inputs: Sequence[Tensor],
    alignment: Count,
) -> list[Any]: ...
def multi_tensor_quantize(
    tensor_list: Sequence[Tensor],
    quantizer_list: Sequence[Quantizer | None],
) -> list[Any]: ...
def multi_tensor_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    scale: float,
) -> None: ...
def multi_tensor_scale_tensor(
    chunk_size: int,
    is_infinite: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    scale: Tensor,
) -> None: ...
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    wd: Finite,
    momentum: Epsilon,
    dampening: Finite,
    lr: Finite,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None: ...
def multi_tensor_swizzle_scales_for_gemm_(
    tensors: Sequence[Tensor],
    rowwise_usage: bool,
    columnwise_usage: bool,
) -> None: ...
def multi_tensor_swizzle_scales_for_gemm_unchecked_(
    tensors: Sequence[Tensor],
    rowwise_usage: bool,
    columnwise_usage: bool,
) -> None: ...
def multi_tensor_transpose_to_bhsd(
    inputs: Sequence[Tensor | None],
    original_format: str,
    outputs: Sequence[Tensor | None] = [],
) -> list[Any | None]: ...
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    inv_scale: Tensor,
    per_tensor_python: bool | None,
) -> tuple[Any, Any]: ...
def mxfp8_scaling_compute_partial_amax(
    input: Tensor,
    amax_rowwise: Tensor,
    amax_colwise: Tensor,
    rows: Size,
    cols: Size,
    start_offset: Size,
) -> None: ...
def mxfp8_scaling_partial_cast(
    input: Tensor,
    output_rowwise: Tensor,
    output_colwise: Tensor,
    scale_inv_rowwise: Tensor,
    scale_inv_colwise: Tensor,
    rows: Size,
    cols: Size,
    start_offset: Size,
) -> None: ...
def newton_schulz(
    ctx_ptr: int,
    m: int,
    n: int,
    x: Tensor,
    num_iterations: int,
    coefficients: Sequence[float],
) -> None: ...
def nvfp4_2d_compute_partial_amax(
    tensor: Tensor,
    amax: Tensor,
    h: Size,
    w: Size,
    start_offset: Size,
    block_len: Count = 16,
) -> None: ...
def nvfp4_2d_multi_tensor_transpose(
    rowwise_data_list: Sequence[Tensor],
    columnwise_data_list: Sequence[Tensor],
    rowwise_scale_inv_list: Sequence[Tensor],
    columnwise_scale_inv_list: Sequence[Tensor],
    M_list: Shape,
    K_list: Shape,
) -> None: ...
def nvfp4_2d_partial_cast(
    inp: Tensor,
    out: Tensor,
    scale: Tensor,
    global_scale: Tensor,
    h: Size,
    w: Size,
    start_offset: Size,
    block_len: Count = 16,
) -> None: ...
def nvfp4_2d_scale_transpose(
    input: Tensor,
    output: Tensor,
    M_tiles: Size,
    K_tiles: Size,
) -> None: ...
def nvfp4_compute_global_scale(
    global_amax: Tensor,
    global_scale: Tensor,
) -> None: ...
def nvfp4_compute_per_block_scale(
    block_amax: Tensor,
    scale: Tensor,
    global_amax: Tensor,
) -> None: ...
def nvfp4_data_transpose(
    input: Tensor,
    *,
    out: Tensor | None,
) -> Any: ...
def nvfp4_expand_scale_to_fp8(
    input: Tensor,
    output: Tensor,
    tile_rows: Size,
    tile_cols: Size,
    rows_padded: Size,
    block_len: Count,
) -> None: ...
def nvfp4_fused_scale(
    block_amax: Tensor,
    global_amax: Tensor,
    per_block_scale: Tensor,
    target_scale: Tensor,
    target_amax: Tensor,
    tile_rows: Size,
    tile_cols: Size,
    rows_padded: Size,
    block_len: Count,
) -> None: ...
def nvfp4_group_quantize_with_amax(
    tensor: Tensor,
    quantizer: Quantizer,
    num_tensors: Count,
    first_dims: Tensor,
    last_dims: Tensor | None = None,
    rowwise_amax: GivenTensor = None,
    columnwise_amax: GivenTensor = None,
    tensor_offsets: Tensor | None = None,
) -> Any: ...
def nvfp4_multi_tensor_2d_partial_cast(
    inp_list: Sequence[Tensor],
    out_list: Sequence[Tensor],
    scale_list: Sequence[Tensor],
    global_scale_list: Sequence[Tensor],
    h_list: Shape,
    w_list: Shape,
    start_offset_list: Shape,
    block_len: Count = 16,
) -> None: ...
def nvfp4_multi_tensor_compute_partial_amax(
    master_weight_list: Sequence[Tensor],
    partial_amax_list: Sequence[Tensor],
    global_amax_list: Sequence[Tensor],
    h_list: Shape,
    w_list: Shape,
    start_offset_list: Shape,
    block_len: Count = 16,
) -> None: ...
def nvfp4_multi_tensor_fused_scale(
    block_amax_list: Sequence[Tensor],
    global_amax_list: Sequence[Tensor],
    per_block_scale_list: Sequence[Tensor],
    target_scale_list: Sequence[Tensor],
    target_amax_list: Sequence[Tensor],
    tile_rows_list: Shape,
    tile_cols_list: Shape,
    rows_padded_list: Shape,
    block_len: Count,
) -> None: ...
def nvfp4_quantize_with_amax(
    tensor: Tensor,
    quantizer: Quantizer,
    rowwise_amax: Tensor | None,
    columnwise_amax: Tensor | None,
) -> Any: ...
def nvshmem_finalize() -> None: ...
def nvshmem_send_on_current_stream(
    src: Tensor,
    dst: Tensor,
    peer: int,
    signal: Tensor,
) -> None: ...
def nvshmem_wait_on_current_stream(
    signal: Tensor,
    wait_kind: str,
) -> None: ...
def nvte_built_with_cublasmp() -> bool: ...
def qgeglu(
    input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def qgelu(
    input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def quantize(
    tensor: Tensor,
    quantizer: Quantizer,
    output: QuantizedTensor | None = None,
    noop: Tensor | None = None,
) -> Any: ...
def reglu(
    input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def relu(
    input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def rmsnorm_bwd(
    dz: Tensor,
    x: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]: ...
def rmsnorm_bwd_add(
    dz: Tensor,
    x: Tensor,
    add: Tensor,
    rsigma: Tensor,
    gamma: Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]: ...
def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: Epsilon,
    ln_out: Tensor | None,
    quantizer: Quantizer | None,
    otype: RealDType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]: ...
def scaled_aligned_causal_masked_softmax_backward(
    output_grads_: Tensor,
    softmax_results_: Tensor,
    scale_factor: Finite,
) -> Any: ...
def scaled_aligned_causal_masked_softmax_forward(
    input: Tensor,
    scale_factor: Finite,
) -> Any: ...
def scaled_clamped_dswiglu(
    grad: Tensor,
    fwd_input: Tensor,
    act_scales: Tensor,
    quantizer: Quantizer | None,
    limit: Limit = 7.0,
    alpha: Finite = 1.702,
    glu_linear_offset: Finite = 1.0,
    glu_interleave_size: Size = 0,
    compute_scale_grad: bool = True,
) -> Any: ...
def scaled_clamped_swiglu(
    input: Tensor,
    act_scales: Tensor,
    quantizer: Quantizer | None,
    limit: Limit = 7.0,
    alpha: Finite = 1.702,
    glu_linear_offset: Finite = 1.0,
    glu_interleave_size: Size = 0,
) -> Any: ...
def scaled_dsituglu(
    grad: Tensor,
    fwd_input: Tensor,
    act_scales: Tensor,
    quantizer: Quantizer | None,
    beta1: Positive = 4.0,
    beta2: Positive = 25.0,
    glu_interleave_size: Size = 0,
    compute_scale_grad: bool = True,
) -> Any: ...
def scaled_dsrelu(
    grad: Tensor,
    fwd_input: Tensor,
    act_scales: Tensor,
    quantizer: Quantizer | None,
    compute_scale_grad: bool = True,
) -> Any: ...
def scaled_dswiglu(
    grad: Tensor,
    fwd_input: Tensor,
    act_scales: Tensor,
    quantizer: Quantizer | None,
    glu_interleave_size: Size = 0,
    compute_scale_grad: bool = True,
) -> Any: ...
def scaled_masked_softmax_backward(
    output_grad_: Tensor,
    softmax_results_: Tensor,
    scale_factor: Finite,
) -> Any: ...
def scaled_masked_softmax_forward(
    input: Tensor,
    mask: Tensor,
    scale_factor: Finite,
) -> Any: ...
def scaled_situglu(
    input: Tensor,
    act_scales: Tensor,
    quantizer: Quantizer | None,
    beta1: Positive = 4.0,
    beta2: Positive = 25.0,
    glu_interleave_size: Size = 0,
) -> Any: ...
def scaled_softmax_backward(
    output_grad_: Tensor,
    softmax_results_: Tensor,
    scale_factor: Finite,
) -> Any: ...
def scaled_softmax_forward(
    input: Tensor,
    scale_factor: Finite,
) -> Any: ...
def scaled_srelu(
    input: Tensor,
    act_scales: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def scaled_swiglu(
    input: Tensor,
    act_scales: Tensor,
    quantizer: Quantizer | None,
    glu_interleave_size: Size = 0,
) -> Any: ...
def scaled_upper_triang_masked_softmax_backward(
    output_grads_: Tensor,
    softmax_results_: Tensor,
    scale_factor: Finite,
) -> Any: ...
def scaled_upper_triang_masked_softmax_forward(
    input: Tensor,
    scale_factor: Finite,
) -> Any: ...
def silu(
    input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def situglu(
    input: Tensor,
    quantizer: Quantizer | None,
    beta1: Positive = 4.0,
    beta2: Positive = 25.0,
) -> Any: ...
def split_quantize(
    tensor: Tensor,
    split_sections: Shape,
    quantizer_list: Sequence[Quantizer | None],
    disable_bulk_allocation: bool = False,
) -> list[Any]: ...
def splits_to_offsets(
    first_dims: Tensor,
    logical_last_dim: Size,
) -> Any: ...
def splits_to_offsets_multi(
    split_sizes: Tensor,
    device: Device,
    *,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[DTypeLike],
    bulk_allocate: bool = False,
) -> tuple[Any, list[Any]]: ...
def sreglu(
    input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def srelu(
    input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def swap_first_dims(
    tensor: Tensor,
    *,
    out: Tensor | None,
) -> Any: ...
def swiglu(
    input: Tensor,
    quantizer: Quantizer | None,
) -> Any: ...
def swizzle_scales_and_pack_ptrs_for_discrete_weights(
    data_tensors: Sequence[Tensor],
    scale_tensors: Sequence[Tensor],
    swizzle_type: str,
    device: Device,
) -> tuple[Any, Any, Any]: ...
def swizzle_scales_for_gemm_(
    tensor: Tensor,
) -> None: ...
def te_general_grouped_gemm(
    A: list[Tensor],
    transa: bool,
    B: list[Tensor],
    transb: bool,
    D: list[Tensor] | None,
    D_type: FloatingDType,
    m_splits: list[int],
    bias: list[Tensor],
    bias_type: FloatingDType | None,
    single_output: bool,
    pre_gelu_out: list[Tensor],
    grad: bool,
    workspace: list[Tensor],
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Any: ...
def te_general_grouped_gemm_for_discrete_in(
    A: GroupedTensor | Sequence[Tensor],
    transa: bool,
    B: GroupedTensor | Sequence[Tensor],
    transb: bool,
    D: GroupedTensor | Sequence[Tensor],
    bias: GroupedTensor | None,
    bias_scale: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    workspace_setup: Tensor | None,
    workspace_cublas: Tensor | None,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Any: ...
def te_general_grouped_gemm_for_discrete_out(
    A: GroupedTensor | Sequence[Tensor],
    transa: bool,
    B: GroupedTensor | Sequence[Tensor],
    transb: bool,
    D: GroupedTensor | Sequence[Tensor],
    bias: GroupedTensor | None,
    bias_scale: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    workspace_setup: Tensor | None,
    workspace_cublas: Tensor | None,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Any: ...
def te_general_grouped_gemm_for_grouped_tensor(
    A: GroupedTensor | Sequence[Tensor],
    transa: bool,
    B: GroupedTensor | Sequence[Tensor],
    transb: bool,
    D: GroupedTensor | Sequence[Tensor],
    bias: GroupedTensor | None,
    bias_scale: Tensor | None,
    alpha: Tensor,
    beta: Tensor,
    workspace_setup: Tensor | None,
    workspace_cublas: Tensor | None,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Any: ...
def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: Tensor,
    inp: Tensor,
    cu_seqlens_padded: Lengths,
    cu_seqlens: Lengths,
) -> None: ...
def thd_cp_rank_order_to_sequence_order(
    inp: Tensor,
    cu_seqlens: Lengths,
    cp_size: Count,
    total_tokens: Size,
) -> Any: ...
def thd_get_partitioned_indices(
    cu_seqlens: Lengths,
    total_tokens: Size,
    world_size: Count,
    rank: Size,
) -> Any: ...
def thd_grad_correction(
    grad: Tensor,
    grad_per_step: Tensor,
    cu_seqlens: Lengths,
    first_half: str,
    second_half: str,
) -> None: ...
def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    old_lse: Tensor | None = None,
    lse: Tensor | None = None,
    lse_per_step: Tensor | None = None,
    cu_seqlens: Tensor | bool | None = None,
    only_second_half: bool | None = None,
    lse_packed: bool | None = None,
) -> None: ...
def thd_read_half_tensor(
    tensor: Tensor,
    cu_seqlens: Lengths,
    half_idx: int,
) -> Any: ...
def thd_read_second_half_lse(
    lse: Tensor,
    cu_seqlens: Lengths,
    lse_packed: bool,
    second_half_lse_seqlen: Size,
) -> Any: ...
def thd_second_half_lse_correction(
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Lengths,
    lse_packed: bool,
) -> None: ...
def thd_sequence_order_to_cp_rank_order(
    inp: Tensor,
    cu_seqlens: Lengths,
    cp_size: Count,
    total_tokens: Size,
) -> Any: ...
def ubuf_built_with_mpi() -> bool: ...
