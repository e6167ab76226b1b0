"""Quantizers, quantized tensors, recipes, and the state of scaling."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.quantized.autograd import *
from fusible.quantized.block_quantizer import BlockScalingQuantizer, Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer, register_block_format
from fusible.quantized.block_recipes import *
from fusible.quantized.block_storage import *
from fusible.quantized.custom import *
from fusible.quantized.formats import *
from fusible.quantized.grouped import GroupedTensorStorage
from fusible.quantized.grouped_tensor import *
from fusible.quantized.hybrid import *
from fusible.quantized.identity import *
from fusible.quantized.options import MMParams, QParams
from fusible.quantized.quantizer import *
from fusible.quantized.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, HighPrecision, Recipe
from fusible.quantized.recipe_state import *
from fusible.quantized.roles import DelayedScalingRequest, QuantizerRequest, QuantizerRole, get_align_size_for_quantization, quantizer_for_role
from fusible.quantized.saving import flatten_state_dict, from_plain, register_saved, to_plain, unflatten_state_dict
from fusible.quantized.state import *
from fusible.quantized.storage import FieldStorage, Float8TensorStorage, QuantizedTensorStorage
from fusible.quantized.tensor import *
from fusible.quantized.tensor_spec import *
from fusible.quantized.tensors import *

__all__ = _public_names(globals())
