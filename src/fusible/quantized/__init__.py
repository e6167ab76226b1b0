"""Quantizers, quantized tensors, recipes, and the state of scaling."""

from __future__ import annotations

from fusible.quantized.block_quantizer import BlockScalingQuantizer, Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from fusible.quantized.block_storage import BlockScaledStorage, Float8BlockwiseQTensorStorage, MXFP8TensorStorage, NVFP4TensorStorage
from fusible.quantized.formats import FP8_MAX, Format
from fusible.quantized.grouped import GroupedTensorStorage
from fusible.quantized.quantizer import Float8CurrentScalingQuantizer, Float8Quantizer, Quantizer
from fusible.quantized.recipe import DelayedScaling, Float8CurrentScaling, HighPrecision, MMParams, QParams, Recipe
from fusible.quantized.state import ScalingState
from fusible.quantized.storage import Float8TensorStorage, QuantizedTensorStorage
from fusible.quantized.tensor import Float8Tensor, QuantizedTensor

__all__ = [
    "BlockScaledStorage",
    "BlockScalingQuantizer",
    "DelayedScaling",
    "FP8_MAX",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensorStorage",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "Float8TensorStorage",
    "Format",
    "GroupedTensorStorage",
    "HighPrecision",
    "MMParams",
    "MXFP8Quantizer",
    "MXFP8TensorStorage",
    "NVFP4Quantizer",
    "NVFP4TensorStorage",
    "QParams",
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "Recipe",
    "ScalingState",
]
