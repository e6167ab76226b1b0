"""The operations, each with its backward, written in nvte functions alone."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.ops.activation import *
from fusible.ops.add import *
from fusible.ops.attention import CrossAttention, DotProductAttention
from fusible.ops.collectives import *
from fusible.ops.context_parallel import *
from fusible.ops.dropout import *
from fusible.ops.elementary import *
from fusible.ops.experts import *
from fusible.ops.extra import *
from fusible.ops.grouped_mmt import *
from fusible.ops.latent_attention import *
from fusible.ops.mmt import *
from fusible.ops.normalization import *
from fusible.ops.op import *
from fusible.ops.parallel_mmt import *
from fusible.ops.qk_norm import *
from fusible.ops.residual import *

__all__ = _public_names(globals())
