"""The operations, each with its backward, written in nvte words alone."""

from __future__ import annotations

from fusible.ops.activation import GELU, GLU, QGELU, Activation, GeGLU, QGeGLU, ReGLU, ReLU, SiLU, SReGLU, SReLU, SwiGLU
from fusible.ops.add import Add
from fusible.ops.attention import DotProductAttention
from fusible.ops.dropout import Dropout
from fusible.ops.mmt import MMT
from fusible.ops.normalization import LayerNorm, RMSNorm
from fusible.ops.op import Context, Op
from fusible.ops.residual import ResidualBegin, ResidualEnd

__all__ = [
    "Activation",
    "Add",
    "Context",
    "DotProductAttention",
    "Dropout",
    "GELU",
    "GLU",
    "GeGLU",
    "LayerNorm",
    "MMT",
    "Op",
    "QGELU",
    "QGeGLU",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ResidualBegin",
    "ResidualEnd",
    "SReGLU",
    "SReLU",
    "SiLU",
    "SwiGLU",
]
