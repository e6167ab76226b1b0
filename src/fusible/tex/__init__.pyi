# ruff: noqa: F401, F403, F405, E501, A002, I001
"""Written by `make stub` from the declarations of fusible.tex.interface; their documentation is there."""

from collections.abc import Sequence
from typing import Any
from fusible.tex.interface.domains import AnyDType, BooleanNumber, Count, Decay, Epsilon, FP8DType, Finite, FloatingDType, GivenDType, GivenTensor, Indices, Lengths, Limit, Positive, Probability, Size

from fusible.tex import backends as backends, classes as classes, enums as enums, grouped_mlp_experimental as grouped_mlp_experimental, prim as prim
from fusible.tex.classes import *
from fusible.tex.dispatch import Call as Call, dispatcher as dispatcher, explain as explain, hand_over as hand_over, record as record
from fusible.tex.enums import *
from fusible.tex.extend import declare as declare, implement as implement, undeclare as undeclare
from fusible.tex.factories import build_quantized as build_quantized, register_factory as register_factory
from fusible.tex.implementations import BackendImplKind as BackendImplKind, BackendPriority as BackendPriority, OpImpl as OpImpl
from fusible.tex.interface.base import TEXBackendBase as TEXBackendBase
from fusible.tex.interface.declare import DECLARATIONS as DECLARATIONS, Request as Request, function as function, requires as requires
from fusible.tex.management import coverage as coverage, get_backend as get_backend, get_policy as get_policy, list_backends as list_backends, register_backend as register_backend, set_backend as set_backend, set_policy as set_policy
from fusible.tex.operands import register_kind as register_kind
from fusible.tex.policy import Policy as Policy
from fusible.tex.registry import Decision as Decision, registry as registry
from fusible.tex.taping import Heard as Heard, listening as listening

def bgrad_group_quantize(
    tensor: Any,
    quantizer: Any,
    num_tensors: Count,
    first_dims: Any,
    last_dims: Any = None,
    tensor_offsets: Any = None,
) -> Any: ...
def bgrad_quantize(
    input: Any,
    quantizer: Any,
) -> list[Any]: ...
def bulk_allocate(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[Any],
    device: Any = None,
    alignments: Sequence[int] | None = None,
) -> list[Any]: ...
def bulk_overlap_ag_with_external_gemm(
    allgather_communicator: Any,
    send_stream: Any,
    recv_stream: Any,
) -> None: ...
def clamped_dswiglu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
    limit: Limit = 7.0,
    alpha: Finite = 1.702,
    glu_linear_offset: Finite = 1.0,
) -> Any: ...
def clamped_swiglu(
    input: Any,
    quantizer: Any,
    limit: Limit = 7.0,
    alpha: Finite = 1.702,
    glu_linear_offset: Finite = 1.0,
) -> Any: ...
def compute_amax(
    input: Any,
    amax: Any,
) -> None: ...
def convert_bshd_to_thd(
    tensor: Any,
    cu_seqlens: Lengths,
    t: Size,
) -> Any: ...
def convert_thd_to_bshd(
    tensor: Any,
    cu_seqlens: Lengths,
    b: Size,
    max_seq_len: Size,
) -> Any: ...
def copy_data_ptrs_to_device(
    tensors: Sequence[Any],
    device: Any,
) -> Any: ...
def copy_to_kv_cache(
    new_k: Any,
    new_v: Any,
    k_cache: Any,
    v_cache: Any,
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
    quantizer: Any,
    shape: Sequence[int],
    dtype: Any,
    device: Any,
    pin_memory: bool,
) -> Any: ...
def create_nvshmem_tensor(
    shape: Sequence[int],
    dtype: Any,
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
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
) -> list[Any]: ...
def dbias_dqgelu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
) -> list[Any]: ...
def dbias_drelu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
) -> list[Any]: ...
def dbias_dsilu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
) -> list[Any]: ...
def dbias_dsrelu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
) -> list[Any]: ...
def dequantize(
    input: Any,
    otype: FloatingDType,
) -> Any: ...
def device_supports_multicast(
    device_id: int = -1,
) -> bool: ...
def dgeglu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
) -> Any: ...
def dgelu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
) -> Any: ...
def dglu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
) -> Any: ...
def dqgeglu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
) -> Any: ...
def dqgelu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
) -> Any: ...
def dreglu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
) -> Any: ...
def drelu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
) -> Any: ...
def dropout_bwd(
    grad_output: Any,
    mask: Any,
    dropout_probability: Probability,
    grad_input: Any = None,
) -> Any: ...
def dropout_fwd(
    input: Any,
    dropout_probability: Probability,
    out: Any = None,
) -> list[Any]: ...
def dsilu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
) -> Any: ...
def dsituglu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
    beta1: Positive = 4.0,
    beta2: Positive = 25.0,
) -> Any: ...
def dsreglu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
) -> Any: ...
def dsrelu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
) -> Any: ...
def dswiglu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
) -> Any: ...
def ep_combine(
    handle_mem: Any,
    expert_out: Any,
    result: Any,
) -> None: ...
def ep_combine_bwd(
    handle_mem: Any,
    grad: Any,
    grad_expert_out: Any,
    grad_scale_inv: Any = None,
    grad_expert_out_scale_inv: Any = None,
) -> None: ...
def ep_dispatch(
    handle_mem: Any,
    topk_idx: Any,
    tokens: Any,
    topk_weights: Any,
    recv_tokens: Any,
    recv_topk_weights: Any,
    tokens_scale_inv: Any = None,
    recv_scale_inv: Any = None,
) -> None: ...
def ep_dispatch_bwd(
    handle_mem: Any,
    grad: Any,
    g_recv_topk_weights: Any,
    grad_tokens: Any,
    grad_topk_weights: Any,
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
    handle_mem: Any,
    topk_idx: Any,
    tokens_per_expert: Any,
    top_k: int,
    dispatch_output_per_expert_alignment: int,
    total_recv_tokens: Any,
) -> None: ...
def ep_prepare_and_dispatch(
    handle_mem: Any,
    topk_idx: Any,
    tokens: Any,
    topk_weights: Any,
    tokens_per_expert: Any,
    total_recv_tokens: Any,
    top_k: int,
    dispatch_output_per_expert_alignment: int,
    recv_tokens: Any = None,
    recv_topk_weights: Any = None,
    recv_scale_inv: Any = None,
    tokens_scale_inv: Any = None,
) -> list[Any]: ...
def ep_zero_copy_supported() -> bool: ...
def fa_prepare_bwd(
    q: Any,
    k: Any,
    v: Any,
) -> Any: ...
def fa_prepare_fwd(
    qkvi: Any,
) -> Any: ...
def fp8_block_scaling_compute_partial_amax(
    tensor: Any,
    amax: Any,
    h: Size,
    w: Size,
    start_offset: Size,
    block_len: Count,
) -> None: ...
def fp8_block_scaling_partial_cast(
    inp: Any,
    out: Any,
    scale: Any,
    h: Size,
    w: Size,
    start_offset: Size,
    block_len: Count,
    out_dtype: FP8DType,
) -> None: ...
def fp8_transpose(
    input: Any,
    dtype: FP8DType,
    *,
    out: Any,
) -> Any: ...
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Any,
    amax_histories: Sequence[Any],
    scales: Sequence[Any],
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
    Q: Any,
    K: Any,
    V: Any,
    O: Any,
    dO: Any,
    fake_dtype: FloatingDType,
    Aux_CTX_Tensors: Sequence[Any],
    cu_seqlens_q_padded: Lengths | None,
    cu_seqlens_kv_padded: Lengths | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
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
    Q: Any,
    K: Any,
    V: Any,
    fake_dtype: FloatingDType,
    cu_seqlens_q_padded: Lengths | None,
    cu_seqlens_kv_padded: Lengths | None,
    page_table_k: Indices | None,
    page_table_v: Indices | None,
    s_quantizer: Any,
    o_quantizer: Any,
    Bias: Any,
    SoftmaxOffset: Any,
    rng_gen: Any,
    rng_elts_per_thread: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> list[Any]: ...
def fused_moe_aux_loss_bwd(
    Const_buf: Any,
    tokens_per_expert: Any,
    num_rows: Size,
    num_cols: Size,
    grad_aux_loss: Any,
) -> Any: ...
def fused_moe_aux_loss_fwd(
    probs: Any,
    tokens_per_expert: Any,
    total_num_tokens: Count,
    num_experts: Count,
    num_rows: Size,
    num_cols: Size,
    topk: Count,
    coeff: Finite,
) -> Any: ...
def fused_moe_aux_loss_fwd_graph_safe(
    probs: Any,
    tokens_per_expert: Any,
    total_num_tokens: Any,
    num_experts: Count,
    num_rows: Size,
    num_cols: Size,
    topk: Count,
    coeff: Finite,
) -> Any: ...
def fused_multi_row_padding(
    input: Any,
    output: Any,
    input_row_list: Sequence[int],
    padded_input_row_list: Sequence[int],
) -> None: ...
def fused_multi_row_unpadding(
    input: Any,
    output: Any,
    input_row_list: Sequence[int],
    unpadded_input_row_list: Sequence[int],
) -> None: ...
def fused_qkv_rope_backward(
    q_grad_out: Any,
    k_grad_out: Any,
    v_grad_out: Any,
    q_freqs: Any,
    k_freqs: Any,
    qkv_split_arg_list: Sequence[int],
    qkv_format: NVTE_QKV_Format,
    interleaved: bool,
    cp_size: Count,
    cp_rank: Size,
) -> Any: ...
def fused_qkv_rope_forward(
    qkv_input: Any,
    q_freqs: Any,
    k_freqs: Any,
    start_positions: Lengths | None,
    qkv_split_arg_list: Sequence[int],
    qkv_format: NVTE_QKV_Format,
    interleaved: bool,
    cp_size: Count,
    cp_rank: Size,
) -> Any: ...
def fused_rope_backward(
    output_grads: Any,
    freqs: Any,
    start_positions: Lengths | None,
    qkv_format: NVTE_QKV_Format,
    interleaved: bool,
    cu_seqlens: Lengths | None,
    cp_size: Count,
    cp_rank: Size,
) -> Any: ...
def fused_rope_forward(
    input: Any,
    freqs: Any,
    start_positions: Lengths | None,
    qkv_format: NVTE_QKV_Format,
    interleaved: bool,
    cu_seqlens: Lengths | None,
    cp_size: Count,
    cp_rank: Size,
) -> Any: ...
def fused_score_for_moe_aux_loss_bwd(
    intermediate_output: Any,
    grad_scores: Any,
    grad_logits: Any,
    topk: Count,
    score_function: str,
) -> None: ...
def fused_score_for_moe_aux_loss_fwd(
    logits: Any,
    topk: Count,
    score_function: str,
    routing_map_format: NVTERoutingMapFormat | int = 0,
) -> Any: ...
def fused_topk_with_score_function_bwd(
    routing_map: Any,
    intermediate_output: Any,
    grad_probs: Any,
    grad_logits: Any,
    topk: Count,
    use_pre_softmax: bool,
    scaling_factor: Finite | None,
    score_function: str,
    use_dense_indices: bool = False,
    routing_map_format: NVTERoutingMapFormat | int = 0,
) -> None: ...
def fused_topk_with_score_function_fwd(
    logits: Any,
    topk: Count,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: Finite | None,
    score_function: str,
    expert_bias: Any,
    routing_map_format: NVTERoutingMapFormat | int = 0,
    topk_indices: Any = None,
) -> Any: ...
def fused_topk_with_score_function_qb_fwd(
    logits: Any,
    topk: Count,
    scaling_factor: Finite | None,
    expert_bias: Any,
    routing_map_format: NVTERoutingMapFormat,
    topk_indices: Any,
    histogram: Any,
    bin_bounds: Any,
    histogram_mode: NVTEQBHistogramMode,
    bin_bounds_validated: bool = False,
) -> Any: ...
def geglu(
    input: Any,
    quantizer: Any,
) -> Any: ...
def gelu(
    input: Any,
    quantizer: Any,
) -> Any: ...
def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: FloatingDType | None,
    bias: Any,
    bias_type: FloatingDType | None,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: CommOverlapType | None = None,
    extra_output: Any = None,
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
    input: Any,
    quantizer: Any,
) -> Any: ...
def group_dequantize(
    input: Any,
    otype: FloatingDType,
) -> Any: ...
def group_quantize(
    tensor: Any,
    quantizer: Any,
    num_tensors: Count,
    first_dims: Any,
    last_dims: Any = None,
    tensor_offsets: Any = None,
    noop_flag: Any = None,
    output: Any = None,
) -> Any: ...
def group_requantize_inplace(
    grouped_x: Any,
    quantizer: Any,
    num_tensors: Count,
    first_dims: Any,
    otype: FloatingDType,
    tensor_offsets: Any = None,
    return_dequantized: bool = False,
) -> Any: ...
def group_scaled_clamped_swiglu(
    input_2h: Any,
    prob: Any,
    quantizer: Any,
    num_tensors: Count,
    limit: Positive,
    alpha: Finite = 1.702,
    glu_linear_offset: Finite = 1.0,
    first_dims: Any = None,
    last_dims: Any = None,
    tensor_offsets: Any = None,
) -> Any: ...
def group_scaled_swiglu(
    input_2h: Any,
    prob: Any,
    quantizer: Any,
    num_tensors: Count,
    first_dims: Any = None,
    last_dims: Any = None,
    tensor_offsets: Any = None,
) -> Any: ...
def grouped_swizzle_for_gemm(
    tensor: Any,
    rowwise: bool,
    columnwise: bool,
) -> None: ...
def init_nvshmem_backend(
    process_group: Any,
) -> None: ...
def layernorm_bwd(
    dz: Any,
    x: Any,
    mu: Any,
    rsigma: Any,
    gamma: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]: ...
def layernorm_fwd(
    input: Any,
    weight: Any,
    bias: Any,
    eps: Epsilon,
    ln_out: Any,
    quantizer: Any,
    otype: FloatingDType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]: ...
def moe_permute_bwd(
    input: Any,
    dtype: AnyDType,
    row_id_map: Any,
    prob: Any,
    num_tokens: Size,
    topK: Count,
) -> Any: ...
def moe_permute_fwd(
    input: Any,
    dtype: AnyDType,
    indices: Any,
    num_out_tokens: int,
    workspace: list[Any],
    max_expanded_token_num: int,
) -> Any: ...
def moe_unpermute_bwd(
    input_bwd: Any,
    input_fwd: Any,
    dtype: AnyDType,
    row_id_map: Any,
    prob: Any,
) -> Any: ...
def moe_unpermute_fwd(
    input: Any,
    dtype: AnyDType,
    row_id_map: Any,
    prob: Any,
    num_tokens: Size,
    topK: Count,
) -> Any: ...
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Any,
    tensor_lists: Sequence[Sequence[Any]],
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
    noop_flag: Any,
    tensor_lists: Sequence[Sequence[Any]],
    lr: Any,
    beta1: Decay,
    beta2: Decay,
    epsilon: Epsilon,
    step: Any,
    mode: BooleanNumber,
    bias_correction: BooleanNumber,
    weight_decay: Finite,
    inv_scale: Any,
) -> None: ...
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Any,
    tensor_lists: Sequence[Sequence[Any]],
    lr: Any,
    beta1: Decay,
    beta2: Decay,
    epsilon: Epsilon,
    step: Any,
    mode: BooleanNumber,
    bias_correction: BooleanNumber,
    weight_decay: Finite,
    inv_scale: Any,
) -> None: ...
def multi_tensor_adam_fp8(
    chunk_size: int,
    noop_flag: Any,
    tensor_lists: Sequence[Sequence[Any]],
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
    noop_flag: Any,
    tensor_lists: Sequence[Sequence[Any]],
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
    noop_flag: Any,
    tensor_lists: Sequence[Sequence[Any]],
    max_fp8: Positive,
    force_pow_2_scales: bool,
    epsilon: Epsilon,
) -> None: ...
def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int,
    dummy: Any,
    tensor_lists: Sequence[Sequence[Any]],
) -> None: ...
def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: Any,
    tensor_lists: Sequence[Sequence[Any]],
    per_tensor_python: bool | None,
) -> tuple[Any, Any]: ...
def multi_tensor_pad_last_dim(
    inputs: Sequence[Any],
    alignment: Count,
) -> list[Any]: ...
def multi_tensor_quantize(
    tensor_list: Sequence[Any],
    quantizer_list: Sequence[Any],
) -> list[Any]: ...
def multi_tensor_scale(
    chunk_size: int,
    noop_flag: Any,
    tensor_lists: Sequence[Sequence[Any]],
    scale: float,
) -> None: ...
def multi_tensor_scale_tensor(
    chunk_size: int,
    is_infinite: Any,
    tensor_lists: Sequence[Sequence[Any]],
    scale: Any,
) -> None: ...
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Any,
    tensor_lists: Sequence[Sequence[Any]],
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
    tensors: Sequence[Any],
    rowwise_usage: bool,
    columnwise_usage: bool,
) -> None: ...
def multi_tensor_swizzle_scales_for_gemm_unchecked_(
    tensors: Sequence[Any],
    rowwise_usage: bool,
    columnwise_usage: bool,
) -> None: ...
def multi_tensor_transpose_to_bhsd(
    inputs: Sequence[Any | None],
    original_format: str,
    outputs: Sequence[Any | None] = [],
) -> list[Any | None]: ...
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Any,
    tensor_lists: Sequence[Sequence[Any]],
    inv_scale: Any,
    per_tensor_python: bool | None,
) -> tuple[Any, Any]: ...
def mxfp8_scaling_compute_partial_amax(
    input: Any,
    amax_rowwise: Any,
    amax_colwise: Any,
    rows: Size,
    cols: Size,
    start_offset: Size,
) -> None: ...
def mxfp8_scaling_partial_cast(
    input: Any,
    output_rowwise: Any,
    output_colwise: Any,
    scale_inv_rowwise: Any,
    scale_inv_colwise: Any,
    rows: Size,
    cols: Size,
    start_offset: Size,
) -> None: ...
def newton_schulz(
    ctx_ptr: int,
    m: int,
    n: int,
    x: Any,
    num_iterations: int,
    coefficients: Sequence[float],
) -> None: ...
def nvfp4_2d_compute_partial_amax(
    tensor: Any,
    amax: Any,
    h: Size,
    w: Size,
    start_offset: Size,
    block_len: Count = 16,
) -> None: ...
def nvfp4_2d_multi_tensor_transpose(
    rowwise_data_list: Sequence[Any],
    columnwise_data_list: Sequence[Any],
    rowwise_scale_inv_list: Sequence[Any],
    columnwise_scale_inv_list: Sequence[Any],
    M_list: Sequence[int],
    K_list: Sequence[int],
) -> None: ...
def nvfp4_2d_partial_cast(
    inp: Any,
    out: Any,
    scale: Any,
    global_scale: Any,
    h: Size,
    w: Size,
    start_offset: Size,
    block_len: Count = 16,
) -> None: ...
def nvfp4_2d_scale_transpose(
    input: Any,
    output: Any,
    M_tiles: Size,
    K_tiles: Size,
) -> None: ...
def nvfp4_compute_global_scale(
    global_amax: Any,
    global_scale: Any,
) -> None: ...
def nvfp4_compute_per_block_scale(
    block_amax: Any,
    scale: Any,
    global_amax: Any,
) -> None: ...
def nvfp4_data_transpose(
    input: Any,
    *,
    out: Any,
) -> Any: ...
def nvfp4_expand_scale_to_fp8(
    input: Any,
    output: Any,
    tile_rows: Size,
    tile_cols: Size,
    rows_padded: Size,
    block_len: Count,
) -> None: ...
def nvfp4_fused_scale(
    block_amax: Any,
    global_amax: Any,
    per_block_scale: Any,
    target_scale: Any,
    target_amax: Any,
    tile_rows: Size,
    tile_cols: Size,
    rows_padded: Size,
    block_len: Count,
) -> None: ...
def nvfp4_group_quantize_with_amax(
    tensor: Any,
    quantizer: Any,
    num_tensors: Count,
    first_dims: Any,
    last_dims: Any = None,
    rowwise_amax: GivenTensor = None,
    columnwise_amax: GivenTensor = None,
    tensor_offsets: Any = None,
) -> Any: ...
def nvfp4_multi_tensor_2d_partial_cast(
    inp_list: Sequence[Any],
    out_list: Sequence[Any],
    scale_list: Sequence[Any],
    global_scale_list: Sequence[Any],
    h_list: Sequence[int],
    w_list: Sequence[int],
    start_offset_list: Sequence[int],
    block_len: Count = 16,
) -> None: ...
def nvfp4_multi_tensor_compute_partial_amax(
    master_weight_list: Sequence[Any],
    partial_amax_list: Sequence[Any],
    global_amax_list: Sequence[Any],
    h_list: Sequence[int],
    w_list: Sequence[int],
    start_offset_list: Sequence[int],
    block_len: Count = 16,
) -> None: ...
def nvfp4_multi_tensor_fused_scale(
    block_amax_list: Sequence[Any],
    global_amax_list: Sequence[Any],
    per_block_scale_list: Sequence[Any],
    target_scale_list: Sequence[Any],
    target_amax_list: Sequence[Any],
    tile_rows_list: Sequence[int],
    tile_cols_list: Sequence[int],
    rows_padded_list: Sequence[int],
    block_len: Count,
) -> None: ...
def nvfp4_quantize_with_amax(
    tensor: Any,
    quantizer: Any,
    rowwise_amax: Any,
    columnwise_amax: Any,
) -> Any: ...
def nvshmem_finalize() -> None: ...
def nvshmem_send_on_current_stream(
    src: Any,
    dst: Any,
    peer: int,
    signal: Any,
) -> None: ...
def nvshmem_wait_on_current_stream(
    signal: Any,
    wait_kind: str,
) -> None: ...
def nvte_built_with_cublasmp() -> bool: ...
def qgeglu(
    input: Any,
    quantizer: Any,
) -> Any: ...
def qgelu(
    input: Any,
    quantizer: Any,
) -> Any: ...
def quantize(
    tensor: Any,
    quantizer: Any,
    output: Any = None,
    noop: Any = None,
) -> Any: ...
def reglu(
    input: Any,
    quantizer: Any,
) -> Any: ...
def relu(
    input: Any,
    quantizer: Any,
) -> Any: ...
def rmsnorm_bwd(
    dz: Any,
    x: Any,
    rsigma: Any,
    gamma: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]: ...
def rmsnorm_bwd_add(
    dz: Any,
    x: Any,
    add: Any,
    rsigma: Any,
    gamma: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]: ...
def rmsnorm_fwd(
    input: Any,
    weight: Any,
    eps: Epsilon,
    ln_out: Any,
    quantizer: Any,
    otype: FloatingDType,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]: ...
def scaled_aligned_causal_masked_softmax_backward(
    output_grads_: Any,
    softmax_results_: Any,
    scale_factor: Finite,
) -> Any: ...
def scaled_aligned_causal_masked_softmax_forward(
    input: Any,
    scale_factor: Finite,
) -> Any: ...
def scaled_clamped_dswiglu(
    grad: Any,
    fwd_input: Any,
    act_scales: Any,
    quantizer: Any,
    limit: Limit = 7.0,
    alpha: Finite = 1.702,
    glu_linear_offset: Finite = 1.0,
    glu_interleave_size: Size = 0,
    compute_scale_grad: bool = True,
) -> Any: ...
def scaled_clamped_swiglu(
    input: Any,
    act_scales: Any,
    quantizer: Any,
    limit: Limit = 7.0,
    alpha: Finite = 1.702,
    glu_linear_offset: Finite = 1.0,
    glu_interleave_size: Size = 0,
) -> Any: ...
def scaled_dsituglu(
    grad: Any,
    fwd_input: Any,
    act_scales: Any,
    quantizer: Any,
    beta1: Positive = 4.0,
    beta2: Positive = 25.0,
    glu_interleave_size: Size = 0,
    compute_scale_grad: bool = True,
) -> Any: ...
def scaled_dsrelu(
    grad: Any,
    fwd_input: Any,
    act_scales: Any,
    quantizer: Any,
    compute_scale_grad: bool = True,
) -> Any: ...
def scaled_dswiglu(
    grad: Any,
    fwd_input: Any,
    act_scales: Any,
    quantizer: Any,
    glu_interleave_size: Size = 0,
    compute_scale_grad: bool = True,
) -> Any: ...
def scaled_masked_softmax_backward(
    output_grad_: Any,
    softmax_results_: Any,
    scale_factor: Finite,
) -> Any: ...
def scaled_masked_softmax_forward(
    input: Any,
    mask: Any,
    scale_factor: Finite,
) -> Any: ...
def scaled_situglu(
    input: Any,
    act_scales: Any,
    quantizer: Any,
    beta1: Positive = 4.0,
    beta2: Positive = 25.0,
    glu_interleave_size: Size = 0,
) -> Any: ...
def scaled_softmax_backward(
    output_grad_: Any,
    softmax_results_: Any,
    scale_factor: Finite,
) -> Any: ...
def scaled_softmax_forward(
    input: Any,
    scale_factor: Finite,
) -> Any: ...
def scaled_srelu(
    input: Any,
    act_scales: Any,
    quantizer: Any,
) -> Any: ...
def scaled_swiglu(
    input: Any,
    act_scales: Any,
    quantizer: Any,
    glu_interleave_size: Size = 0,
) -> Any: ...
def scaled_upper_triang_masked_softmax_backward(
    output_grads_: Any,
    softmax_results_: Any,
    scale_factor: Finite,
) -> Any: ...
def scaled_upper_triang_masked_softmax_forward(
    input: Any,
    scale_factor: Finite,
) -> Any: ...
def silu(
    input: Any,
    quantizer: Any,
) -> Any: ...
def situglu(
    input: Any,
    quantizer: Any,
    beta1: Positive = 4.0,
    beta2: Positive = 25.0,
) -> Any: ...
def split_quantize(
    tensor: Any,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]: ...
def splits_to_offsets(
    first_dims: Any,
    logical_last_dim: Size,
) -> Any: ...
def splits_to_offsets_multi(
    split_sizes: Any,
    device: Any,
    *,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[Any],
    bulk_allocate: bool = False,
) -> tuple[Any, list[Any]]: ...
def sreglu(
    input: Any,
    quantizer: Any,
) -> Any: ...
def srelu(
    input: Any,
    quantizer: Any,
) -> Any: ...
def swap_first_dims(
    tensor: Any,
    *,
    out: Any,
) -> Any: ...
def swiglu(
    input: Any,
    quantizer: Any,
) -> Any: ...
def swizzle_scales_and_pack_ptrs_for_discrete_weights(
    data_tensors: Sequence[Any],
    scale_tensors: Sequence[Any],
    swizzle_type: str,
    device: Any,
) -> tuple[Any, Any, Any]: ...
def swizzle_scales_for_gemm_(
    tensor: Any,
) -> None: ...
def te_general_grouped_gemm(
    A: list[Any],
    transa: bool,
    B: list[Any],
    transb: bool,
    D: list[Any] | None,
    D_type: FloatingDType,
    m_splits: list[int],
    bias: list[Any],
    bias_type: FloatingDType | None,
    single_output: bool,
    pre_gelu_out: list[Any],
    grad: bool,
    workspace: list[Any],
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Any: ...
def te_general_grouped_gemm_for_discrete_in(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Any,
    bias: Any,
    bias_scale: Any,
    alpha: Any,
    beta: Any,
    workspace_setup: Any,
    workspace_cublas: Any,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Any: ...
def te_general_grouped_gemm_for_discrete_out(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Any,
    bias: Any,
    bias_scale: Any,
    alpha: Any,
    beta: Any,
    workspace_setup: Any,
    workspace_cublas: Any,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Any: ...
def te_general_grouped_gemm_for_grouped_tensor(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Any,
    bias: Any,
    bias_scale: Any,
    alpha: Any,
    beta: Any,
    workspace_setup: Any,
    workspace_cublas: Any,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Any: ...
def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: Any,
    inp: Any,
    cu_seqlens_padded: Lengths,
    cu_seqlens: Lengths,
) -> None: ...
def thd_cp_rank_order_to_sequence_order(
    inp: Any,
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
    grad: Any,
    grad_per_step: Any,
    cu_seqlens: Lengths,
    first_half: str,
    second_half: str,
) -> None: ...
def thd_out_correction(
    out: Any,
    out_per_step: Any,
    old_lse: Any = None,
    lse: Any = None,
    lse_per_step: Any = None,
    cu_seqlens: Any = None,
    only_second_half: bool | None = None,
    lse_packed: bool | None = None,
) -> None: ...
def thd_read_half_tensor(
    tensor: Any,
    cu_seqlens: Lengths,
    half_idx: int,
) -> Any: ...
def thd_read_second_half_lse(
    lse: Any,
    cu_seqlens: Lengths,
    lse_packed: bool,
    second_half_lse_seqlen: Size,
) -> Any: ...
def thd_second_half_lse_correction(
    lse: Any,
    lse_per_step: Any,
    cu_seqlens: Lengths,
    lse_packed: bool,
) -> None: ...
def thd_sequence_order_to_cp_rank_order(
    inp: Any,
    cu_seqlens: Lengths,
    cp_size: Count,
    total_tokens: Size,
) -> Any: ...
def ubuf_built_with_mpi() -> bool: ...
