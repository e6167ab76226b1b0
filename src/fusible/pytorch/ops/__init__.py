"""Fusible operations for PyTorch: the programming model of ``transformer_engine.pytorch.ops``, on the same engine as ``fusible.Sequential``."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.pytorch.ops import fused
from fusible.pytorch.ops.basic import *
from fusible.pytorch.ops.fuser import *
from fusible.pytorch.ops.glu_layout import *
from fusible.pytorch.ops.linear import *
from fusible.pytorch.ops.op import BasicOperation, FusedOperation, FusibleOperation, OperationContext
from fusible.pytorch.ops.registration import (
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
    unregister_fusion,
)
from fusible.pytorch.ops.sequential import *
from fusible.pytorch.ops.tensors import maybe_dequantize

__all__ = _public_names(globals(), "fused")
