"""NVIDIA's modules by their names, signatures, parameters and state dicts, made of Fusible's operations and its pipeline."""

from __future__ import annotations

from fusible.compat.te_modules.attention import *
from fusible.compat.te_modules.base import TransformerEngineBaseModule
from fusible.compat.te_modules.grouped_linear import *
from fusible.compat.te_modules.inference import InferenceParams, KVCacheManager, NonPagedKVCacheManager, PagedKVCacheManager
from fusible.compat.te_modules.layernorm_mlp import *
from fusible.compat.te_modules.linear import *
from fusible.compat.te_modules.linear_attention import *
from fusible.compat.te_modules.multi_head_attention import *
from fusible.compat.te_modules.normalization import LayerNorm, RMSNorm
from fusible.compat.te_modules.recomputation import *
from fusible.compat.te_modules.rope import *
from fusible.compat.te_modules.transformer import *
from fusible.facade import public_names as _public_names

__all__ = _public_names(globals())
