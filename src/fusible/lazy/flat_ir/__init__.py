"""The second IR: operations 1:1 with StableHLO's, still bound to the operations and lines that they came from. ``FlatIR`` is a program of it."""

from fusible.facade import public_names as _public_names
from fusible.lazy.flat_ir.flat_ir import *
from fusible.lazy.flat_ir.op import *
from fusible.lazy.flat_ir.tensor import *

__all__ = _public_names(globals())
