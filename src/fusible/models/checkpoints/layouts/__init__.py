"""How quantized weights are stored, one file a number format: the tensors of each, and what they become."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.models.checkpoints.layouts.blocks import *
from fusible.models.checkpoints.layouts.float8 import *
from fusible.models.checkpoints.layouts.layout import Parts, Weight, WeightLayout
from fusible.models.checkpoints.layouts.mxfp4 import *
from fusible.models.checkpoints.layouts.nvfp4 import *
from fusible.models.checkpoints.layouts.own import *

__all__ = _public_names(globals())
