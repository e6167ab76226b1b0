"""The modules."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.pytorch.modules.activation import *
from fusible.pytorch.modules.attention import *
from fusible.pytorch.modules.base import BaseModule, ParameterInitMethod, has_hooks
from fusible.pytorch.modules.dropout import *
from fusible.pytorch.modules.experts import *
from fusible.pytorch.modules.linear import *
from fusible.pytorch.modules.normalization import LayerNorm, RMSNorm
from fusible.pytorch.modules.sequential import Residual, Sequential

__all__ = _public_names(globals())
