"""The operations, each with its backward, written in nvte words alone."""

from __future__ import annotations

from fusible.ops.activation import GELU, GLU, QGELU, Activation, GeGLU, QGeGLU, ReGLU, ReLU, SiLU, SReGLU, SReLU
from fusible.ops.add import Add
from fusible.ops.attention import CrossAttention, DotProductAttention
from fusible.ops.collectives import AllGather, AllReduce, Collective, ReduceScatter
from fusible.ops.dropout import Dropout
from fusible.ops.elementary import ConstantScale, Identity, Quantize, Reshape
from fusible.ops.extra import AddExtra, MakeExtra
from fusible.ops.grouped_mmt import GroupedMMT
from fusible.ops.mmt import MMT
from fusible.ops.normalization import L2Normalization, LayerNorm, RMSNorm
from fusible.ops.op import Context, Op
from fusible.ops.parallel_mmt import ColumnParallelMMT, ParallelMMT, RowParallelMMT
from fusible.ops.qk_norm import QKNorm
from fusible.ops.residual import ResidualBegin, ResidualEnd
from fusible.ops.scaled_activation import ScaledClampedQGeGLU, ScaledSiTUGLU, ScaledSReLU, ScaledSwiGLU
from fusible.ops.swiglu import ClampedSwiGLU, SiTUGLU, SwiGLU

__all__ = [
    "Activation",
    "Add",
    "AddExtra",
    "AllGather",
    "AllReduce",
    "ClampedSwiGLU",
    "Collective",
    "ColumnParallelMMT",
    "ConstantScale",
    "Context",
    "CrossAttention",
    "DotProductAttention",
    "Dropout",
    "GELU",
    "GLU",
    "GeGLU",
    "GroupedMMT",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "MMT",
    "MakeExtra",
    "Op",
    "ParallelMMT",
    "QGELU",
    "QGeGLU",
    "QKNorm",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "ResidualBegin",
    "ResidualEnd",
    "RowParallelMMT",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
]
