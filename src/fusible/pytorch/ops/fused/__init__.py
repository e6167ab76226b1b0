"""Fused operations by their names in ``transformer_engine.pytorch.ops.fused``.

None is registered, and none need be: the engine's matcher picks the same fused passes for the same operations by itself. Each of these is for who
wants to say so: an instance in the place of its basic operations, or its ``fuse_forward_ops`` or ``fuse_backward_ops`` given to
``register_forward_fusion`` or ``register_backward_fusion``. Either way a plan calls the engine's fused passes, and nothing is added to a call.

A match does not depend on ``in_place`` of ``AddExtraInput`` and ``MakeExtraOutput``, on the recipe, or on the type of the weight.
"""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.pytorch.ops.fused.backward_activation_bias import *
from fusible.pytorch.ops.fused.backward_add_rmsnorm import *
from fusible.pytorch.ops.fused.backward_linear_add import *
from fusible.pytorch.ops.fused.backward_linear_scale import *
from fusible.pytorch.ops.fused.forward_linear_bias_activation import *
from fusible.pytorch.ops.fused.forward_linear_bias_add import *
from fusible.pytorch.ops.fused.forward_linear_scale_add import *
from fusible.pytorch.ops.fused.grouped_mlp import GroupedMLP_CuTeGEMMGLU, GroupedMLP_CuTeGEMMUnary
from fusible.pytorch.ops.fused.userbuffers_backward_linear import *
from fusible.pytorch.ops.fused.userbuffers_forward_linear import *

__all__ = _public_names(globals())
