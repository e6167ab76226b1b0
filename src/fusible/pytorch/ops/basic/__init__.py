"""The basic operations."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.pytorch.ops.basic.activation import *
from fusible.pytorch.ops.basic.collectives import *
from fusible.pytorch.ops.basic.dropout import *
from fusible.pytorch.ops.basic.elementary import *
from fusible.pytorch.ops.basic.grouped_linear import GroupedLinear, is_op_fuser_grouped_tensor_path_supported
from fusible.pytorch.ops.basic.linear import *
from fusible.pytorch.ops.basic.normalization import *
from fusible.pytorch.ops.basic.scaled_tanh_srelu import *

__all__ = _public_names(globals())
