"""The basic operations."""

from __future__ import annotations

from fusible.pytorch.ops.basic.activation import GEGLU, GELU, GLU, QGEGLU, QGELU, ReGLU, ReLU, ScaledSReLU, ScaledTanhSReLU, SiLU, SReGLU, SReLU
from fusible.pytorch.ops.basic.collectives import AllGather, AllReduce, ReduceScatter
from fusible.pytorch.ops.basic.dropout import Dropout
from fusible.pytorch.ops.basic.elementary import AddExtraInput, ConstantScale, Identity, L2Normalization, MakeExtraOutput, Quantize, Reshape
from fusible.pytorch.ops.basic.grouped_linear import GroupedLinear, is_op_fuser_grouped_tensor_path_supported
from fusible.pytorch.ops.basic.linear import BasicLinear, Bias
from fusible.pytorch.ops.basic.normalization import LayerNorm, RMSNorm
from fusible.pytorch.ops.basic.swiglu import ClampedSwiGLU, ScaledClampedQGeGLU, ScaledSiTUGLU, ScaledSwiGLU, SiTUGLU, SwiGLU

__all__ = [
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "GEGLU",
    "GELU",
    "GLU",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "MakeExtraOutput",
    "QGEGLU",
    "QGELU",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "ScaledTanhSReLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "is_op_fuser_grouped_tensor_path_supported",
]
