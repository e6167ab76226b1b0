"""Fused operations by their names in ``transformer_engine.pytorch.ops.fused``.

None is registered, and none need be: the engine's matcher picks the same fused passes for the same operations by itself. Each of these is for who
wants to say so: an instance in the place of its basic operations, or its ``fuse_forward_ops`` or ``fuse_backward_ops`` given to
``register_forward_fusion`` or ``register_backward_fusion``. Either way a plan calls the engine's fused passes, and nothing is added to a call.

A match does not depend on ``in_place`` of ``AddExtraInput`` and ``MakeExtraOutput``, on the recipe, or on the type of the weight.
"""

from __future__ import annotations

from fusible.pytorch.ops.fused.backward_activation_bias import BackwardActivationBias
from fusible.pytorch.ops.fused.backward_add_rmsnorm import BackwardAddLayerNorm, BackwardAddRMSNorm
from fusible.pytorch.ops.fused.backward_linear_add import BackwardLinearAdd
from fusible.pytorch.ops.fused.backward_linear_scale import BackwardLinearScale
from fusible.pytorch.ops.fused.forward_linear_bias_activation import ForwardLinearBiasActivation
from fusible.pytorch.ops.fused.forward_linear_bias_add import ForwardLinearBiasAdd
from fusible.pytorch.ops.fused.forward_linear_scale_add import ForwardLinearScaleAdd
from fusible.pytorch.ops.fused.grouped_mlp import GroupedMLP_CuTeGEMMGLU, GroupedMLP_CuTeGEMMUnary
from fusible.pytorch.ops.fused.userbuffers_backward_linear import UserbuffersBackwardLinear
from fusible.pytorch.ops.fused.userbuffers_forward_linear import UserbuffersForwardLinear

__all__ = [
    "BackwardActivationBias",
    "BackwardAddLayerNorm",
    "BackwardAddRMSNorm",
    "BackwardLinearAdd",
    "BackwardLinearScale",
    "ForwardLinearBiasActivation",
    "ForwardLinearBiasAdd",
    "ForwardLinearScaleAdd",
    "GroupedMLP_CuTeGEMMGLU",
    "GroupedMLP_CuTeGEMMUnary",
    "UserbuffersBackwardLinear",
    "UserbuffersForwardLinear",
]
