"""Modules: parameters by name and a ``forward`` that records."""

from fusible.lazy.modules.batch_norm import BatchNorm
from fusible.lazy.modules.conv import Conv, ConvTranspose
from fusible.lazy.modules.embedding import Embedding
from fusible.lazy.modules.group_norm import GroupNorm
from fusible.lazy.modules.instance_norm import InstanceNorm
from fusible.lazy.modules.layer_norm import LayerNorm
from fusible.lazy.modules.linear import Linear
from fusible.lazy.modules.module import LoadedKeys, Module
from fusible.lazy.modules.parameter import DefaultParameter, UninitializedError
from fusible.lazy.modules.sequential import Sequential

__all__ = [
    "BatchNorm",
    "Conv",
    "ConvTranspose",
    "DefaultParameter",
    "Embedding",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "Linear",
    "LoadedKeys",
    "Module",
    "Sequential",
    "UninitializedError",
]
