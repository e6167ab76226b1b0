"""Modules: parameters by name and a ``forward`` that records."""

from fusible.facade import public_names as _public_names
from fusible.lazy.modules.batch_norm import *
from fusible.lazy.modules.conv import *
from fusible.lazy.modules.embedding import *
from fusible.lazy.modules.group_norm import *
from fusible.lazy.modules.instance_norm import *
from fusible.lazy.modules.layer_norm import *
from fusible.lazy.modules.linear import *
from fusible.lazy.modules.module import *
from fusible.lazy.modules.parameter import DefaultParameter, UninitializedError
from fusible.lazy.modules.sequential import *

__all__ = _public_names(globals())
