"""How the package's own fusions are registered: for ops between which values pass in high precision.

What one op hands to the next inside of a fused pass is never written, so nobody could quantize it there, nor observe its amax. Where an op asks for
it in 8 bits, the ops run one by one. The operands of products are another matter: a fused pass asks the product for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fusible.fusions.registry import register_fusion_backward, register_fusion_forward, register_fusion_inference
from fusible.nvte import is_quantized_type
from fusible.ops import MMT, Add, Op

__all__ = ["fused_backward", "fused_forward", "fused_inference"]


def _forward(ops: Sequence[Op]) -> bool:
    types = [*(op.x_dtype for op in ops[1:]), *(op.bias_dtype for op in ops if isinstance(op, Add))]
    return not any(is_quantized_type(type) for type in types)


def _backward(ops: Sequence[Op]) -> bool:
    return not any(is_quantized_type(op.dy_dtype) for op in ops[:-1] if not isinstance(op, MMT))


fused_inference = partial(register_fusion_inference, when=_forward)
fused_forward = partial(register_fusion_forward, when=_forward)
fused_backward = partial(register_fusion_backward, when=_backward)
