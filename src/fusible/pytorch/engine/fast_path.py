"""The fast path: calls of plans (``Plan.fast_path``) that depend on x and the parameters alone, all in high precision: modules in fp32 or bf16,
whose calls cost what Python does around the kernels. ``fusible.pytorch.engine.call`` serves every plan; this does the same for these plans, with
nothing to take apart, to look up or to hand on between regions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fusible.compute_pipeline import Plan, Region, run_backward, run_forward, run_inference
from fusible.nvte import Leaf, Tensor, flatten, nvte_dtype, unflatten
from fusible.pytorch.engine.program import Executor
from fusible.quantized import QuantizedTensor

__all__ = ["FastPathCall", "infer_fast_path"]


class FastPathCall:
    """``Call`` on the fast path: the same methods, of which none takes or gives side values."""

    def __init__(self, plan: Plan, args: Sequence[torch.Tensor], executor: Executor) -> None:
        self.plan, self._args, self._executor = plan, args, executor
        self._left: dict[int, Any] = {}

    def forward(self, index: int, x: torch.Tensor, _: Sequence[torch.Tensor] = ()) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """``y``, no side values, and the tensors to save for the backward of the segment."""
        segment = self.plan.segments[index]
        (region,) = segment.forward
        program = partial(_forward, self.plan, region)
        (y, *saved), self._left[index] = self._executor((region, "forward"), program, [x, *self._args[segment.args]])
        return y, [], saved

    def backward(
        self, index: int, saved: list[torch.Tensor], dy: torch.Tensor, _: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """``dx``, and the gradients of the segment's parameters; None for what is not wanted. ``saved`` is emptied."""
        (region,) = self.plan.segments[index].backward
        program = partial(_backward, self.plan, region, *self._left[index])
        inputs = [dy.dequantize() if isinstance(dy, QuantizedTensor) else dy, *saved]
        saved.clear()
        found, there = self._executor((region, "backward"), program, inputs)
        grads = iter(found)
        dx, *of_args = [next(grads) if present else None for present in there]
        return dx, of_args


def infer_fast_path(plan: Plan, executor: Executor, x: torch.Tensor, args: Sequence[torch.Tensor]) -> torch.Tensor:
    """The output of the inference of a plan on the fast path."""
    (region,) = plan.inferred
    return executor((region, "inference"), partial(_inference, plan, region), [x, *args])[0][0]


def _operands(plan: Plan, region: Region, leaves: Sequence[Any]) -> tuple[Tensor, list[Tensor]]:
    return Tensor(leaves[0], plan.request.activation), unflatten(leaves[1:], plan.plain_args[region.args])


def _inference(plan: Plan, region: Region, leaves: list[Any]) -> tuple[list[Any], Any]:
    x, args = _operands(plan, region, leaves)
    return [run_inference(plan, region, x, args, {}, {})[0].data], None


def _forward(plan: Plan, region: Region, leaves: list[Any]) -> tuple[list[Any], Any]:
    """y and what is saved; per op the names of what it saves, and how all of that was taken apart."""
    x, args = _operands(plan, region, leaves)
    result = run_forward(plan, region, x, args, {}, {})
    saved, spec = flatten([tensor for ctx in result.contexts for tensor in ctx.values()])
    return [result.y.data, *saved], (tuple(tuple(ctx) for ctx in result.contexts), spec)


def _backward(plan: Plan, region: Region, names: Sequence[Sequence[str]], spec: Sequence[Leaf], leaves: list[Any]) -> tuple[list[Any], Any]:
    """The gradients that there are, that of x first; and of each whether it is there."""
    dy = Tensor(leaves[0], nvte_dtype(leaves[0].dtype))
    tensors = unflatten(leaves[1:], spec)[::-1]
    leaves.clear()
    contexts = [{name: tensors.pop() for name in of_op} for of_op in names]
    result = run_backward(plan, region, contexts, dy, {}, {})
    found = [result.dx, *(grad for grads in result.grads for grad in grads)]
    return [grad.data for grad in found if grad is not None], tuple(grad is not None for grad in found)
