"""What a PyTorch user works with: modules, ``Sequential``, ``autocast``, recipes, executors."""

from __future__ import annotations

from fusible.pytorch.autocast import autocast
from fusible.pytorch.executors import register_executor
from fusible.pytorch.held import parameter_bytes, quantize_parameters
from fusible.pytorch.kv_cache import KVCache
from fusible.pytorch.modules import (
    GELU,
    GLU,
    QGELU,
    BaseModule,
    DotProductAttention,
    Dropout,
    GeGLU,
    GroupedQuerySelfAttention,
    LayerNorm,
    Linear,
    MultiHeadedSelfAttention,
    MultiQuerySelfAttention,
    ParameterInitMethod,
    QGeGLU,
    ReGLU,
    ReLU,
    Residual,
    RMSNorm,
    Sequential,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from fusible.quantized import DelayedScaling, Float8CurrentScaling, Format, HighPrecision, Recipe

__all__ = [
    "BaseModule",
    "DelayedScaling",
    "DotProductAttention",
    "Dropout",
    "Float8CurrentScaling",
    "Format",
    "GELU",
    "GLU",
    "GeGLU",
    "GroupedQuerySelfAttention",
    "HighPrecision",
    "KVCache",
    "LayerNorm",
    "Linear",
    "MultiHeadedSelfAttention",
    "MultiQuerySelfAttention",
    "ParameterInitMethod",
    "QGELU",
    "QGeGLU",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "Recipe",
    "Residual",
    "SReGLU",
    "SReLU",
    "Sequential",
    "SiLU",
    "SwiGLU",
    "autocast",
    "parameter_bytes",
    "quantize_parameters",
    "register_executor",
]
