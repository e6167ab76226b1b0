"""The modules."""

from __future__ import annotations

from fusible.pytorch.modules.activation import GELU, GLU, QGELU, GeGLU, QGeGLU, ReGLU, ReLU, SiLU, SReGLU, SReLU, SwiGLU
from fusible.pytorch.modules.attention import (
    CrossAttention,
    DotProductAttention,
    GroupedQuerySelfAttention,
    MultiHeadedSelfAttention,
    MultiQuerySelfAttention,
    QKNorm,
)
from fusible.pytorch.modules.base import BaseModule, ParameterInitMethod, has_hooks
from fusible.pytorch.modules.dropout import Dropout
from fusible.pytorch.modules.linear import Linear
from fusible.pytorch.modules.normalization import LayerNorm, RMSNorm
from fusible.pytorch.modules.sequential import Residual, Sequential

__all__ = [
    "BaseModule",
    "CrossAttention",
    "DotProductAttention",
    "Dropout",
    "GELU",
    "GLU",
    "GeGLU",
    "GroupedQuerySelfAttention",
    "LayerNorm",
    "Linear",
    "MultiHeadedSelfAttention",
    "MultiQuerySelfAttention",
    "ParameterInitMethod",
    "QGELU",
    "QGeGLU",
    "QKNorm",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "Residual",
    "SReGLU",
    "SReLU",
    "Sequential",
    "SiLU",
    "SwiGLU",
    "has_hooks",
]
