"""The first IR: one operation per call that the user made. ``Trace`` is a program of it."""

from fusible.facade import public_names as _public_names
from fusible.lazy.trace.broadcasting import *
from fusible.lazy.trace.dimension import *
from fusible.lazy.trace.fill import *
from fusible.lazy.trace.op import *
from fusible.lazy.trace.specialize import *
from fusible.lazy.trace.storage import *
from fusible.lazy.trace.tensor import *
from fusible.lazy.trace.trace import *

__all__ = _public_names(globals())
