"""What the names of NVIDIA's Python package lead to where that package is not installed: its modules, fusible operations, recipes, quantizers
and tensors."""

from __future__ import annotations

from dataclasses import replace

from fusible.compat.finder import VirtualPackage
from fusible.compat.te_gaps import UNSERVED

__all__ = ["PACKAGES"]

_TE = "transformer_engine"
_VERSION = "2.20.2"
"""The version of the package whose names and signatures these are."""
_OPS = "fusible.pytorch.ops"
_QUANTIZED = "fusible.quantized"
_STATE = "fusible.compat.te_quantization"
_TE_MODULES = "fusible.compat.te_modules"
_TE_FUNCTIONS = "fusible.compat.te_functions"
_OPEN = "fusible.compat.te_recipes"


def _package(of: str | tuple[str, ...], names: str, about: str = "") -> VirtualPackage:
    return VirtualPackage((of,) if isinstance(of, str) else of, tuple(names.split()), about)


def _all(of: dict[str, str], *but: str) -> str:
    return " ".join(names for file, names in of.items() if file not in but)


_BASIC = {
    "activation": "GEGLU GELU GLU QGEGLU QGELU ReGLU ReLU SReGLU SReLU ScaledSReLU ScaledTanhSReLU SiLU",
    "add_extra_input": "AddExtraInput",
    "all_gather": "AllGather",
    "all_reduce": "AllReduce",
    "basic_linear": "BasicLinear",
    "bias": "Bias",
    "constant_scale": "ConstantScale",
    "dropout": "Dropout",
    "grouped_linear": "GroupedLinear is_op_fuser_grouped_tensor_path_supported",
    "identity": "Identity",
    "l2normalization": "L2Normalization",
    "layer_norm": "LayerNorm",
    "make_extra_output": "MakeExtraOutput",
    "quantize": "Quantize",
    "reduce_scatter": "ReduceScatter",
    "reshape": "Reshape",
    "rmsnorm": "RMSNorm",
    "swiglu": "ClampedSwiGLU ScaledClampedQGeGLU ScaledSiTUGLU ScaledSwiGLU SiTUGLU SwiGLU",
}
_FUSED = {
    "backward_activation_bias": "BackwardActivationBias",
    "backward_add_rmsnorm": "BackwardAddRMSNorm",
    "backward_linear_add": "BackwardLinearAdd",
    "backward_linear_scale": "BackwardLinearScale",
    "forward_linear_bias_activation": "ForwardLinearBiasActivation",
    "forward_linear_bias_add": "ForwardLinearBiasAdd",
    "forward_linear_scale_add": "ForwardLinearScaleAdd",
    "grouped_mlp": "GroupedMLP_CuTeGEMMGLU GroupedMLP_CuTeGEMMUnary",
    "userbuffers_backward_linear": "UserbuffersBackwardLinear",
    "userbuffers_forward_linear": "UserbuffersForwardLinear",
}
"""By NVIDIA's file: its public names."""

_REGISTER = "register_backward_fusion register_forward_backward_fusion register_forward_fusion"
_CLASSES = "BasicOperation FusedOperation FusibleOperation"

_OPERATIONS = {
    "": _package(_OPS, f"{_all(_BASIC)} {_REGISTER} {_CLASSES} Linear Sequential", "operations, fusions, Linear and Sequential"),
    ".op": _package(_OPS, f"{_CLASSES} OperationContext"),
    ".fuser": _package(_OPS, f"{_REGISTER} OperationFuser"),
    ".linear": _package(_OPS, "Linear"),
    ".sequential": _package(_OPS, "Sequential"),
    "._common": _package((_OPS, _QUANTIZED), "is_quantized_tensor maybe_dequantize"),
    ".basic": _package(_OPS, _all(_BASIC), "operations on one tensor"),
    **{f".basic.{file}": _package(_OPS, names) for file, names in _BASIC.items()},
    ".basic.grouped_linear": _package((_OPS, f"{_OPS}.basic.grouped_linear"), f"{_BASIC['grouped_linear']} GRAD_INPUT_BUFFER_KEY OUTPUT_BUFFER_KEY"),
    ".fused": _package(f"{_OPS}.fused", _all(_FUSED)),
    **{f".fused.{file}": _package(f"{_OPS}.fused", names) for file, names in _FUSED.items()},
}

_SAVING = "prepare_for_saving restore_from_func_ctx restore_from_saved"
_BASES = "QuantizedTensor QuantizedTensorStorage Quantizer"
_TENSORS = {
    "float8": "Float8Tensor Float8Quantizer Float8CurrentScalingQuantizer",
    "mxfp8": "MXFP8Tensor MXFP8Quantizer",
    "float8_blockwise": "Float8BlockwiseQTensor Float8BlockQuantizer",
    "nvfp4": "NVFP4Tensor NVFP4Quantizer",
    "hybrid": "HybridQuantizedTensor HybridQuantizer",
    "identity": "IdentityTensor IdentityQuantizer",
    "grouped": "GroupedTensor",
}
_STORAGES = {file: f"{names.split()[0]}Storage" for file, names in _TENSORS.items()}
"""By the part of NVIDIA's files' names before ``_tensor`` and ``_tensor_storage``."""

_QUANTIZED_TENSORS = {
    "": _package(_QUANTIZED, f"{_BASES} {_SAVING} {_all(_TENSORS)} {_all(_STORAGES)}", "quantizers, quantized tensors and their storages"),
    ".storage": _package(_QUANTIZED, _all(_STORAGES, "hybrid", "identity")),
    **{f".{file}_tensor": _package(_QUANTIZED, names) for file, names in _TENSORS.items()},
    **{f".storage.{file}_tensor_storage": _package(_QUANTIZED, name) for file, name in _STORAGES.items()},
}

_LAYERS = {
    "linear": "Linear",
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "layernorm_linear": "LayerNormLinear",
    "layernorm_mlp": "LayerNormMLP",
    "grouped_linear": "GroupedLinear",
}
_ATTENTION = {
    "dot_product_attention": "DotProductAttention",
    "multi_head_attention": "MultiheadAttention",
    "inference": "InferenceParams KVCacheManager NonPagedKVCacheManager PagedKVCacheManager",
    "rope": "RotaryPositionEmbedding apply_fused_qkv_rotary_pos_emb apply_rotary_pos_emb",
}
_DELTA = {
    "gdn": "GatedDeltaNetAttention",
    "gdn2": "GatedDeltaNet2Attention",
    "gdp": "GatedDeltaProductAttention",
}
_ATTENTIONS = f"DotProductAttention InferenceParams MultiheadAttention RotaryPositionEmbedding {_all(_DELTA)}"

_BUFFERS = "UserBufferQuantizationMode destroy_ub initialize_ub"

_LAYER_MODULES = {
    ".module": _package((_TE_MODULES, _TE_FUNCTIONS), f"{_all(_LAYERS)} Fp8Padding Fp8Unpadding {_BUFFERS}", "layers"),
    ".module.base": _package((_TE_MODULES, _TE_FUNCTIONS), f"TransformerEngineBaseModule {_BUFFERS}"),
    **{f".module.{file}": _package(_TE_MODULES, names) for file, names in _LAYERS.items()},
    ".attention": _package(_TE_MODULES, _ATTENTIONS, "attention and rotary positions"),
    **{f".attention.{file}": _package(_TE_MODULES, names) for file, names in _ATTENTION.items()},
    ".attention.linear_attention": _package(_TE_MODULES, _all(_DELTA)),
    **{f".attention.linear_attention.{file}": _package(_TE_MODULES, name) for file, name in _DELTA.items()},
    ".transformer": _package(_TE_MODULES, "TransformerLayer"),
    ".distributed": _package((_TE_MODULES, _TE_FUNCTIONS), "CudaRNGStatesTracker checkpoint"),
}

_PERMUTATION = (
    "moe_permute moe_permute_and_pad_with_probs moe_permute_with_probs moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs moe_unpermute"
)
_SCHULZ = "CusolverMpCtx get_coefficient_iterator get_coefficients newton_schulz newton_schulz_tp"
_OPTIMIZERS = {"fused_adam": "FusedAdam", "fused_sgd": "FusedSGD", "multi_tensor_apply": "MultiTensorApply multi_tensor_applier"}
_MULTI_TENSOR = (
    "multi_tensor_adam multi_tensor_adam_capturable multi_tensor_adam_capturable_master multi_tensor_adam_fp8 multi_tensor_l2norm "
    "multi_tensor_scale multi_tensor_scale_tensor multi_tensor_sgd multi_tensor_unscale_l2norm"
)
_DEVICE = "get_cudnn_version get_device_compute_capability is_bf16_available"
_FUNCTIONS = {
    "cpu_offload": "ManualOffloadSynchronizer get_cpu_offload_context mark_not_offload",
    "cross_entropy": "parallel_cross_entropy",
    "export": "onnx_export",
    "graph": "make_graphed_callables",
    "permutation": _PERMUTATION,
    "torch_version": "torch_version",
}
_PADDING = {"fp8_padding": "Fp8Padding", "fp8_unpadding": "Fp8Unpadding"}
_OF_FUNCTIONS = (
    f"{_all({**_FUNCTIONS, **_PADDING})} {_DEVICE} CPLoadBalancingStrategy CudaRNGStatesTracker "
    f"CusolverMpCtx newton_schulz newton_schulz_tp {_BUFFERS}"
)

_FUNCTION_MODULES = {
    **{
        f".{file}": _package(_TE_FUNCTIONS, names) for file, names in _FUNCTIONS.items() if file != "torch_version"
    },  # there the function has the name
    **{f".module.{file}": _package(_TE_FUNCTIONS, name) for file, name in _PADDING.items()},
    ".optimizers": _package((_TE_FUNCTIONS, "fusible.tex"), f"{_all(_OPTIMIZERS)} {_MULTI_TENSOR}", "optimizers and functions of many tensors"),
    **{f".optimizers.{file}": _package(_TE_FUNCTIONS, names) for file, names in {**_OPTIMIZERS, "newton_schulz": _SCHULZ}.items()},
}

_RECIPES = "CustomRecipe DelayedScaling Float8BlockScaling Float8CurrentScaling Format MXFP8BlockScaling NVFP4BlockScaling Recipe"
_CONTEXTS = "fp8_autocast fp8_model_init"
_SUPPORT = "get_default_recipe is_fp8_available is_fp8_block_scaling_available is_mxfp8_available is_nvfp4_available"
_CHECKS = "check_fp8_block_scaling_support check_fp8_support check_mxfp8_support check_nvfp4_support"
_ROLES = "DelayedScalingRequest QuantizerRequest QuantizerRole"
_FP8 = f"{_CONTEXTS} {_CHECKS} {_RECIPES} FP8GlobalStateManager RecipeState"
_QUANTIZATION = f"{_FP8} {_SUPPORT} {_ROLES} autocast get_align_size_for_quantization quantized_model_init"
_SPEC = "TensorSpec to_tensor_spec"
_GLU = "deinterleave_glu_tensor interleave_glu_tensor"
_CONSTANTS = "DType FP8BwdTensorIdx FP8FwdTensorIdx MXFP8_BLOCK_SCALING_SIZE NVFP4_BLOCK_SCALING_SIZE TE_DType TE_DType_To_Torch"
_TOP = (
    f"{_all(_LAYERS)} {_ATTENTIONS} TransformerLayer checkpoint autocast quantized_model_init {_CONTEXTS} {_SUPPORT} {_ROLES} "
    f"{_BASES} {_SAVING} {_all(_TENSORS, 'grouped')} {_all(_STORAGES, 'grouped')} {_GLU} {_OF_FUNCTIONS} DType"
)

_MODULES = {
    "": VirtualPackage(version=_VERSION),
    ".common": VirtualPackage(),
    ".common.recipe": _package((_OPEN, _QUANTIZED), f"{_RECIPES} MMParams QParams"),
    ".pytorch": _package(
        (_TE_MODULES, _TE_FUNCTIONS, _STATE, _QUANTIZED, _OPS, "fusible.tex.enums"),
        _TOP,
        "modules, ops, optimizers, autocast, quantized_model_init, permutations, losses, quantizers and quantized tensors",
    ),
    **{f".pytorch{name}": package for name, package in _FUNCTION_MODULES.items()},
    **{f".pytorch{name}": package for name, package in _LAYER_MODULES.items()},
    **{f".pytorch.ops{name}": package for name, package in _OPERATIONS.items()},
    ".pytorch.quantization": _package((_STATE, _OPEN, _QUANTIZED), _QUANTIZATION, "autocast, quantized_model_init, recipes, roles and recipe state"),
    ".pytorch.fp8": _package((_STATE, _OPEN, _QUANTIZED), _FP8),
    ".pytorch.quantized_tensor": _package(_QUANTIZED, f"{_BASES} {_SAVING}"),
    **{f".pytorch.tensor{name}": package for name, package in _QUANTIZED_TENSORS.items()},
    ".pytorch.dynamo": _package(_QUANTIZED, _SPEC),
    ".pytorch.dynamo.tensor_spec": _package(_QUANTIZED, _SPEC),
    ".pytorch.float8_tensor": _package(_QUANTIZED, "Float8Tensor"),
    ".pytorch.constants": _package(("fusible.compat.te_constants", _TE_FUNCTIONS), f"{_CONSTANTS} CPLoadBalancingStrategy"),
    ".pytorch.utils": _package((_OPS, _TE_FUNCTIONS), f"{_GLU} {_DEVICE}"),
}

PACKAGES = {_TE + name: replace(package, lacking=UNSERVED) for name, package in _MODULES.items()}
"""By name: the module's names, and where they are looked up. NVIDIA's names are all listed of what Fusible has a counterpart of; those that it lacks
are missing with a sentence."""
