"""The framework-oblivious vocabulary: ``Tensor``, types, and the functions that ops are written in."""

from __future__ import annotations

import inspect

from fusible.facade import public_names as _public_names
from fusible.nvte.activation import *
from fusible.nvte.attention import *
from fusible.nvte.casting import *
from fusible.nvte.collectives import *
from fusible.nvte.dropout import *
from fusible.nvte.dtype import *
from fusible.nvte.elementwise import *
from fusible.nvte.execution import *
from fusible.nvte.experts import *
from fusible.nvte.flatten import *
from fusible.nvte.frameworks import *
from fusible.nvte.grouped import *
from fusible.nvte.kinds import EXACT as _EXACT
from fusible.nvte.kinds import KINDS as _KINDS
from fusible.nvte.kv_cache import *
from fusible.nvte.matmul import *
from fusible.nvte.normalization import *
from fusible.nvte.rescaling import *
from fusible.nvte.tensor import Tensor, make_nvte_tensor
from fusible.tex.calls.functions import checked as _checked

__all__ = _public_names(globals())

for _name in __all__:
    if inspect.isfunction(globals()[_name]):
        globals()[_name] = _checked(globals()[_name], known=_KINDS, exact=_EXACT, module=__name__)
