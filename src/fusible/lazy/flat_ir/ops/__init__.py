"""FlatIR operations, each one StableHLO operation."""

from fusible.facade import public_names as _public_names
from fusible.lazy.flat_ir.ops.constant import ConstantOp, IotaOp, constant
from fusible.lazy.flat_ir.ops.convert import *
from fusible.lazy.flat_ir.ops.convolution import *
from fusible.lazy.flat_ir.ops.custom_call import *
from fusible.lazy.flat_ir.ops.dot import *
from fusible.lazy.flat_ir.ops.dynamic import *
from fusible.lazy.flat_ir.ops.elementwise import *
from fusible.lazy.flat_ir.ops.gather import *
from fusible.lazy.flat_ir.ops.reduce import *
from fusible.lazy.flat_ir.ops.shape import *
from fusible.lazy.flat_ir.ops.sort import *

__all__ = _public_names(globals())
