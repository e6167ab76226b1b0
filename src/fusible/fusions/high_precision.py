"""Registration of the package's own fusions: they apply where values pass between the ops in high precision.

What one op hands to the next inside of a fused pass is never written to memory, so it cannot be quantized there, nor its amax be observed. Where an
op asks for it in 8 bits, the ops run one by one. Operands of products may be in 8 bits: a fused pass gets them from the product's op.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec

from fusible import nvte
from fusible.fusions.registry import register_fusion_backward, register_fusion_forward, register_fusion_inference
from fusible.nvte import is_quantized_type
from fusible.ops import MMT, Add, Context, Op

__all__ = ["Fused", "Gradients", "fused_backward", "fused_forward", "inference_of"]

P = ParamSpec("P")

Fused = tuple[nvte.Tensor, Callable[[], tuple[Context, ...]]]
"""The result of a function that becomes a fused forward: y, and a function that makes the ops' contexts. Inference does not call the latter."""

Gradients = tuple[nvte.Tensor | None, Sequence[Sequence[nvte.Tensor | None]]]
"""The result of a fused backward: dx, and the gradients of each op's parameters."""


def _forward(ops: Sequence[Op]) -> bool:
    types = [*(op.x_dtype for op in ops[1:]), *(op.bias_dtype for op in ops if isinstance(op, Add))]
    return not any(is_quantized_type(type) for type in types)


def _backward(ops: Sequence[Op]) -> bool:
    return not any(is_quantized_type(op.dy_dtype) for op in ops[:-1] if not isinstance(op, MMT))


fused_backward = partial(register_fusion_backward, when=_backward)


def fused_forward(function: Callable[P, Fused]) -> Callable[P, tuple[nvte.Tensor, tuple[Context, ...]]]:
    """``function`` as a forward, which makes the contexts; it is registered."""

    @wraps(function)
    def forward(*args: P.args, **kwargs: P.kwargs) -> tuple[nvte.Tensor, tuple[Context, ...]]:
        y, contexts = function(*args, **kwargs)
        return y, contexts()

    return register_fusion_forward(forward, when=_forward)


def inference_of(forward: Callable[P, Any]) -> Callable[P, nvte.Tensor]:
    """The inference that computes as a ``fused_forward`` does and makes no contexts, of its name with ``inf`` for ``fwd``; it is registered."""
    function: Callable[P, Fused] = inspect.unwrap(forward)

    @wraps(function)
    def inference(*args: P.args, **kwargs: P.kwargs) -> nvte.Tensor:
        return function(*args, **kwargs)[0]

    inference.__name__ = inference.__qualname__ = forward.__name__.replace("_fwd_", "_inf_")
    inference.__doc__ = f"y of ``{forward.__name__}``."
    return register_fusion_inference(inference, when=_forward)
