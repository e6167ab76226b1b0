"""What a layout costs, derived from the op list that it becomes: the bytes that each process sends in a step, the memory that it takes, the time.

The op list is that of one transformer block, rewritten as ``parallelize`` rewrites a model's; its plan says what passes between processes, as
``explain`` does, and what each op keeps for backward. Nothing is computed, and no memory is taken: tensors have shapes alone.
"""

from __future__ import annotations

from fusible.distributed.cost.architectures import *
from fusible.distributed.cost.layout import *
from fusible.distributed.cost.memory import *
from fusible.distributed.cost.search import *
from fusible.distributed.cost.time import *
from fusible.distributed.cost.traffic import *
from fusible.facade import public_names as _public_names

__all__ = _public_names(globals())
