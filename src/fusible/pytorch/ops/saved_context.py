"""Contexts of operations: what code that stands in for one pass leaves for the other, or finds there, by name or as NVIDIA's package has it.

A forward that such code computes itself leaves tensors in the order in which the package's operation saves them; a backward finds them so, beside the
attributes that the package's operation sets. Each operation says here in what its own differ; most only in the order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from fusible.nvte import te_to_torch_dtype
from fusible.ops import Op
from fusible.pytorch.ops.op_passes import save_by_name, saved_by_name
from fusible.pytorch.ops.torch_operation import OperationContext, context_names
from fusible.quantized import QuantizedTensorStorage

__all__ = ["ContextOfTheirs"]


class ContextOfTheirs:
    """The part of a basic operation that knows the package's form of its context."""

    keeps_unnamed: ClassVar[bool] = False
    """Whether its op keeps for backward what no parameters of ``Op.context`` name: only its own forward can leave it."""

    def save_for_backward(self, ctx: OperationContext, **tensors: torch.Tensor | QuantizedTensorStorage) -> None:
        """Leave in ``ctx`` what the operation's own backward needs: for a ``fuser_forward`` that computes the output of an operation of ours itself.

        The names are those of the parameters of its op's ``context``: ``x`` of ``BasicLinear`` and of an activation, ``x, mu, rsigma`` of
        ``LayerNorm``, ``x, rsigma`` of ``RMSNorm``; none of ``Bias``, ``ConstantScale`` and other operations whose backward needs nothing, for which
        nothing need be left. Tensors ``[*, columns]`` are cast, or quantized, as the op would have; what is quantized already is taken as it is.
        The operation's parameters need not be given. To be called in forward, once. Raises ``ArgumentError`` for other names.
        """
        save_by_name(self, ctx, tensors)  # pyright: ignore[reportArgumentType]

    def saved_for_backward(self, ctx: OperationContext) -> dict[str, Any]:
        """What the operation's own forward left in ``ctx``, by those names: for a ``fuser_backward`` that computes the gradients of an operation of
        ours itself. What no gradient needs is not there; what is quantized can be read by ``maybe_dequantize``. Raises ``ArgumentError``."""
        return saved_by_name(self, ctx)  # pyright: ignore[reportArgumentType]

    def kept_names(self, op: Op) -> tuple[str, ...]:
        """The names of what the package's operation saves, in its order: what the op's backward needs but for the operation's own parameters."""
        return tuple(name for name in context_names(type(op)) if name not in op.arg_names)

    def unneeded(self, op: Op, name: str) -> bool:
        """Whether no gradient that is wanted of ``op`` needs what it keeps by that name."""
        return False

    def from_theirs(self, op: Op, saved: Sequence[Any] | None, context: OperationContext) -> Mapping[str, Any] | None:
        """By our names what code for the package's operation has saved, as of ``save_for_backward``; None where it is of another form."""
        names, saved = self.kept_names(op), saved or ()
        for wanted in (names, context_names(type(op))):
            if len(saved) == len(wanted) and all(x is not None or self.unneeded(op, name) for name, x in zip(wanted, saved, strict=True)):
                return dict(zip(wanted, saved, strict=True))
        return None

    def as_theirs(self, op: Op, kept: Mapping[str, Any]) -> tuple[Any, ...]:
        """What our own forward has kept, by name, as ``saved_tensors`` of the package's operation; None for what no gradient needs."""
        return tuple(kept.get(name) for name in self.kept_names(op))

    def told(self, op: Op, kept: Mapping[str, Any], lent: Any) -> dict[str, Any]:
        """The attributes by which the package's operation leaves the rest in its context. ``lent``: how the operation before it would have the
        gradient quantized that is handed on to it, or None."""
        sides = {"extra_input_requires_grad": op.wants(op.side_inputs[-1])} if op.side_inputs else {}
        grads = {f"{name}_requires_grad": op.wants(name) for name in op.arg_names}
        quantizers = {"prev_op_grad_output_quantizer": lent, "grad_input_quantizer": lent}
        return {"dtype": te_to_torch_dtype(op.activation), "input_requires_grad": op.wants("x"), **grads, **sides, **quantizers}
