"""NVIDIA's modules by their names, signatures, parameters and state dicts, made of Fusible's operations and its pipeline."""

from __future__ import annotations

from fusible.compat.te_modules.base import TransformerEngineBaseModule
from fusible.compat.te_modules.layernorm_mlp import LayerNormMLP
from fusible.compat.te_modules.linear import LayerNormLinear, Linear
from fusible.compat.te_modules.normalization import LayerNorm, RMSNorm

__all__ = ["LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm", "TransformerEngineBaseModule"]
