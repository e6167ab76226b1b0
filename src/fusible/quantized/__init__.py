"""Quantizers, quantized tensors, recipes, and the state of scaling."""

from __future__ import annotations

from fusible.quantized.autograd import is_quantized_tensor, prepare_for_saving, restore_from_func_ctx, restore_from_saved
from fusible.quantized.block_quantizer import BlockScalingQuantizer, Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer, register_block_format
from fusible.quantized.block_recipes import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from fusible.quantized.block_storage import BlockScaledStorage, Float8BlockwiseQTensorStorage, MXFP8TensorStorage, NVFP4TensorStorage
from fusible.quantized.custom import GEMMParams, GEMMType
from fusible.quantized.formats import FP8_MAX, Format
from fusible.quantized.grouped import GroupedTensorStorage
from fusible.quantized.grouped_tensor import GroupedTensor
from fusible.quantized.hybrid import HybridQuantizedTensor, HybridQuantizedTensorStorage, HybridQuantizer, operand
from fusible.quantized.identity import IdentityQuantizer, IdentityTensor, IdentityTensorStorage
from fusible.quantized.options import MMParams, QParams
from fusible.quantized.quantizer import Float8CurrentScalingQuantizer, Float8Quantizer, Quantizer
from fusible.quantized.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, HighPrecision, Recipe
from fusible.quantized.recipe_state import RecipeState
from fusible.quantized.roles import DelayedScalingRequest, QuantizerRequest, QuantizerRole, get_align_size_for_quantization, quantizer_for_role
from fusible.quantized.saving import flatten_state_dict, from_plain, register_saved, to_plain, unflatten_state_dict
from fusible.quantized.state import ScalingState
from fusible.quantized.storage import FieldStorage, Float8TensorStorage, QuantizedTensorStorage
from fusible.quantized.tensor import QuantizedTensor
from fusible.quantized.tensor_spec import TensorSpec, to_tensor_spec
from fusible.quantized.tensors import Float8BlockwiseQTensor, Float8Tensor, MXFP8Tensor, NVFP4Tensor

__all__ = [
    "BlockScaledStorage",
    "BlockScalingQuantizer",
    "CustomRecipe",
    "DelayedScaling",
    "DelayedScalingRequest",
    "FP8_MAX",
    "FieldStorage",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8BlockwiseQTensor",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "Format",
    "GEMMParams",
    "GEMMType",
    "GroupedTensor",
    "GroupedTensorStorage",
    "HighPrecision",
    "HybridQuantizedTensor",
    "HybridQuantizedTensorStorage",
    "HybridQuantizer",
    "IdentityQuantizer",
    "IdentityTensor",
    "IdentityTensorStorage",
    "MMParams",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "MXFP8TensorStorage",
    "NVFP4BlockScaling",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "NVFP4TensorStorage",
    "QParams",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "Recipe",
    "RecipeState",
    "ScalingState",
    "TensorSpec",
    "flatten_state_dict",
    "from_plain",
    "get_align_size_for_quantization",
    "is_quantized_tensor",
    "operand",
    "prepare_for_saving",
    "quantizer_for_role",
    "register_block_format",
    "register_saved",
    "restore_from_func_ctx",
    "restore_from_saved",
    "to_plain",
    "to_tensor_spec",
    "unflatten_state_dict",
]
