"""The lazy tensor, and what every function of lazy tensors does with its arguments."""

from fusible.facade import public_names as _public_names
from fusible.lazy.frontend.arguments import *
from fusible.lazy.frontend.convert import *
from fusible.lazy.frontend.data import *
from fusible.lazy.frontend.interface import *
from fusible.lazy.frontend.record import *
from fusible.lazy.frontend.registry import *
from fusible.lazy.frontend.tensor import *
from fusible.lazy.frontend.windows import *

__all__ = _public_names(globals())
