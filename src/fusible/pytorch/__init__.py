"""What a PyTorch user works with: modules, ``Sequential``, ``autocast``, recipes, executors."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.machine import keep_freed_memory
from fusible.pytorch.cross_entropy import CrossEntropyLoss
from fusible.pytorch.engine.autocast import autocast
from fusible.pytorch.engine.executors import register_executor
from fusible.pytorch.engine.frozen import frozen_weights
from fusible.pytorch.engine.kv_cache import KVCache
from fusible.pytorch.engine.sequence_parallel import reduce_sequence_parallel_gradients
from fusible.pytorch.modules.activation import *
from fusible.pytorch.modules.attention import *
from fusible.pytorch.modules.base import BaseModule, ParameterInitMethod
from fusible.pytorch.modules.dropout import *
from fusible.pytorch.modules.experts import *
from fusible.pytorch.modules.linear import *
from fusible.pytorch.modules.normalization import LayerNorm, RMSNorm
from fusible.pytorch.modules.sequential import Residual, Sequential
from fusible.pytorch.optimizers import *
from fusible.pytorch.quantized_init import quantized_model_init
from fusible.pytorch.quantized_parameters import *
from fusible.quantized import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    HighPrecision,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

__all__ = _public_names(globals())
