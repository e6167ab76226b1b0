"""``OperationContext``: what the forward of a basic operation leaves for its backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fusible import nvte
from fusible.nvte import DType, Tensor
from fusible.ops import Context, Op

__all__ = ["OperationContext", "not_cleared"]


@dataclass(eq=False)
class OperationContext:
    """What the forward of one basic operation leaves for its backward: tensors by ``save_for_backward``, anything else as attributes.

    ``saved_tensors``: in backward, the tensors that forward saved, in their order. ``requires_grad``: whether backward will come by.
    """

    saved_tensors: tuple[Any, ...] | None = None
    to_save: tuple[Any, ...] | None = None
    _saved_tensors_range: tuple[int, int] | None = None  # a field of NVIDIA's, which nothing here reads
    requires_grad: bool = True

    def __post_init__(self) -> None:
        self._op: Op | None = None  # an operation of ours, as the plan resolved it,
        self._call_inputs: dict[str, Any] = {}  # the values of the whole call that it takes,
        self._tensors: Context | None = None  # and what it saves, by name; None before it has
        self._spec: list[nvte.StorageSpec | nvte.Shell | str] | None = None

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors (torch's, quantized ones, or None) for a backward that is written in torch too. To be called in forward, once.

        For the backward of an operation of ours: ``operation.save_for_backward(ctx, ...)``, by name.
        """
        self.to_save = tensors

    def _flattened(self) -> Context:
        """The saved tensors as entries of a plan's context, which autograd keeps; the rest stays on this object."""
        if self._op is not None and self.to_save is None:
            tensors, self._tensors = self._tensors or {}, None
            return tensors
        leaves: list[Any] = []
        self._spec = []
        for value in self.to_save or ():
            if value is None:
                self._spec.append("none")
            elif isinstance(value, torch.Tensor):
                self._spec.append("tensor")
                leaves.append(value)
            else:
                parts, spec = nvte.flatten_storage(value)
                self._spec.append(spec)
                leaves += parts
        self.to_save = None
        return {f"saved_{i}": Tensor(leaf, DType.Byte) for i, leaf in enumerate(leaves)}  # whatever it is: nobody but the operation looks at it

    def _unflatten(self, context: Context) -> None:
        """The inverse of ``_flattened``, for backward."""
        if self._spec is None:
            self._tensors = context
            self.saved_tensors = tuple(tensor.data for tensor in context.values())
            return
        leaves = iter([tensor.data for tensor in context.values()])
        values: list[Any] = []
        for spec in self._spec:
            values.append(None if spec == "none" else next(leaves) if isinstance(spec, str) else nvte.unflatten_storage(leaves, spec))
        self.saved_tensors = not_cleared(values)

    def _let_go(self) -> None:
        """Forget what was saved: it would otherwise live as long as the call."""
        self.saved_tensors, self._tensors = None, None


def not_cleared(tensors: Iterable[Any]) -> tuple[Any, ...]:
    """Mark tensors so that NVIDIA's functions do not clear them. Code that was written for its package clears what a backward has used, and these may
    be the caller's."""
    found = tuple(tensors)
    for tensor in found:
        if isinstance(tensor, torch.Tensor):
            tensor._do_not_clear = True  # type: ignore[attr-defined]
    return found
