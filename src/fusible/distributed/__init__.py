"""Training and inference by many processes, on ``torch.distributed``: meshes, and how a model is laid out on one."""

from __future__ import annotations

from fusible.distributed.batch import *
from fusible.distributed.checkpoint import *
from fusible.distributed.initialization import *
from fusible.distributed.parallelize import *
from fusible.distributed.quantized_gather import *
from fusible.distributed.stages import *
from fusible.distributed.whole import *
from fusible.ending import end_in_order as _end_in_order
from fusible.facade import public_names as _public_names

__all__ = _public_names(globals())

_end_in_order()
