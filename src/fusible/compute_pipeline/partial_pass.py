"""Running some ops of a plan from within a pass: by these functions a caller's code hands a stretch of ops back to the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fusible.compute_pipeline.execution import backward_group, forward_group, infer_group
from fusible.compute_pipeline.matching import group_ops, needs_backward, outer_sides
from fusible.fusions import registered
from fusible.nvte import Tensor
from fusible.ops import Context, Op

__all__ = ["run_ops", "run_ops_backward"]

Sides = Sequence[Mapping[str, Tensor | None]]


def run_ops(
    ops: Sequence[Op], x: Tensor, sides: Sides, call_inputs: Mapping[str, Any], *, inference: bool = False
) -> tuple[Tensor, list[Context], list[dict[str, Tensor]]]:
    """``(y, contexts, side outputs)`` of the forward, or the inference, of bound ops, by the registered fusions.

    ``sides``: per op, the side inputs that come from outside. The side outputs, per op, are those that leave. In inference the contexts are empty.
    """
    stacks = _stacked(sides)
    contexts: list[Context] = [{} for _ in ops]
    for group in group_ops(ops, registered("inference" if inference else "forward")):
        members = ops[group.start : group.stop]
        if inference:
            x = infer_group(group, members, x, stacks, call_inputs)
        else:
            x, contexts[group.start : group.stop] = forward_group(group, members, x, stacks, call_inputs)
    return x, contexts, _left(outer_sides(ops)[1], stacks)


def run_ops_backward(
    ops: Sequence[Op], contexts: Sequence[Context], dy: Tensor, sides: Sides, call_inputs: Mapping[str, Any]
) -> tuple[Tensor | None, list[Sequence[Tensor | None]], list[dict[str, Tensor | None]]]:
    """``(dx, gradients of parameters, gradients of side inputs)`` of bound ops, by the registered fusions.

    ``sides``: per op, the gradients of the side outputs that leave. The gradients of side inputs, per op, are those of what came from outside.
    """
    stacks = _stacked(sides)
    first = next((i for i, op in enumerate(ops) if needs_backward(op)), len(ops))
    grads: list[Sequence[Tensor | None]] = [[None] * len(op.arg_names) for op in ops]
    d: Tensor | None = dy
    for group in reversed(group_ops(ops, registered("backward"), first)):
        assert d is not None
        covered = slice(group.start, group.stop)
        d, grads[covered] = backward_group(group, ops[covered], [*contexts[covered]], d, stacks, call_inputs)
    return d if first == 0 else None, grads, _left(outer_sides(ops)[0], stacks)


def _stacked(sides: Iterable[Mapping[str, Tensor | None]]) -> dict[str, list[Any]]:
    stacks: dict[str, list[Any]] = {}
    for values in sides:
        for name, value in values.items():
            if value is not None:
                stacks.setdefault(name, []).append(value)
    return stacks


def _left(names: Sequence[Sequence[str]], stacks: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """The values of each op that none of the others has taken."""
    return [{name: stacks[name].pop() if stacks.get(name) else None for name in of_op} for of_op in names]
