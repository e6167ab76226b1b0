"""Functions of NVIDIA's package beside modules and operations: permutations, losses, padding, optimizers, random states, offloading, the device."""

from __future__ import annotations

import inspect

import torch

from fusible.compat.te_functions.cross_entropy import *
from fusible.compat.te_functions.device import *
from fusible.compat.te_functions.offload import *
from fusible.compat.te_functions.optimizers import *
from fusible.compat.te_functions.orthogonalization import *
from fusible.compat.te_functions.padding import *
from fusible.compat.te_functions.permutation import *
from fusible.compat.te_functions.random_states import *
from fusible.compat.te_overlap import UserBufferQuantizationMode, destroy_ub, initialize_ub
from fusible.facade import public_names as _public_names
from fusible.tex.calls.argument_kinds import kind_of as _kind_of
from fusible.tex.calls.functions import checked as _checked

__all__ = _public_names(globals())

_KINDS = {"Tensor": _kind_of("torch.Tensor", {})}
_EXACT = {"Tensor": frozenset({torch.Tensor, torch.nn.Parameter})}
for _name in __all__:
    if inspect.isfunction(globals()[_name]):
        globals()[_name] = _checked(globals()[_name], known=_KINDS, exact=_EXACT, module=__name__)
