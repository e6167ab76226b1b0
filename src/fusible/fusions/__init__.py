"""The fused passes, and how they are registered."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.fusions.add_activation import *
from fusible.fusions.gelu_mmt import *
from fusible.fusions.make_extra import *
from fusible.fusions.mmt_add import *
from fusible.fusions.mmt_gelu import *
from fusible.fusions.mmt_scale import *
from fusible.fusions.registry import *

__all__ = _public_names(globals())
