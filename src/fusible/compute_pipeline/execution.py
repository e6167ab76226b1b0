"""Running the passes of a plan on nvte tensors, real or lazy. Pure: everything comes in as arguments and goes out as results."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusible.compute_pipeline.matching import Group
from fusible.compute_pipeline.plan import Plan, QuantizedArg
from fusible.compute_pipeline.regions import Region
from fusible.compute_pipeline.results import KeptContext, check_backward, check_forward, check_inference, check_takes
from fusible.nvte import KVCache, Pass, Tensor, cast, grouped_cast_stack
from fusible.ops import Context, Op

__all__ = ["BackwardResult", "ForwardResult", "quantize_args", "run_backward", "run_forward", "run_inference"]


Sides = dict[str, list[Any]]
"""Side values by name that are there and yet to be taken, the latest last; None for a gradient that there is none of."""


@dataclass(frozen=True)
class ForwardResult:
    """``contexts``: one per op of the region, empty where backward will not come by. ``amaxes``: by slot, fp32 ``[1]``. ``sides``: the side values
    that are left."""

    y: Tensor
    contexts: list[Context]
    amaxes: Mapping[str, Any]
    sides: Sides


@dataclass(frozen=True)
class BackwardResult:
    """``grads``: one list per op of the region, in the order of its ``args``; None for what nobody wants. ``sides``: the gradients of side values
    that are left."""

    dx: Tensor | None
    grads: list[list[Tensor | None]]
    amaxes: Mapping[str, Any]
    sides: Sides


def quantize_args(values: Sequence[Tensor], args: Sequence[QuantizedArg], scales: Mapping[str, Any]) -> tuple[list[Tensor], Mapping[str, Any]]:
    """Parameters in the 8-bit types in which passes take them, and the amaxes by slot."""
    state, pairs = Pass("forward", scales), list(zip(values, args, strict=True))
    return state.run(lambda: [grouped_cast_stack(value, arg.parts) if arg.parts else cast(value, arg.type) for value, arg in pairs]), state.amaxes


def run_forward(
    plan: Plan,
    region: Region,
    x: Tensor,
    args: Sequence[Tensor],
    call_inputs: Mapping[str, Any],
    scales: Mapping[str, Any],
    taken: Sequence[Any] = (),
    call: dict[Any, Any] | None = None,
) -> ForwardResult:
    """The forward pass of a region; ``args``: its ops' parameters one after another, in the plan's ``arg_types``. ``taken``: the side values that it
    takes (``Region.takes``). ``call``: of ``nvte.Pass``."""
    start, first = region.start, plan.first_backward
    ops = _with_args(plan, region, args)
    contexts: list[Context] = [_EMPTY] * len(ops)
    sides = _sides_of(region, taken)
    state = Pass("forward", scales, call=call)

    def body() -> Tensor:
        y = x
        for group in region.groups:
            y, ctxs = forward_group(group, ops[group.start - start : group.stop - start], y, sides, call_inputs)
            for i, ctx in enumerate(ctxs, group.start):
                if i >= first:
                    contexts[i - start] = ctx
        return y

    return ForwardResult(state.run(body), contexts, state.amaxes, sides)


def run_inference(
    plan: Plan,
    region: Region,
    x: Tensor,
    args: Sequence[Tensor],
    call_inputs: Mapping[str, Any],
    scales: Mapping[str, Any],
    caches: Mapping[int, KVCache] | None = None,
    taken: Sequence[Any] = (),
    call: dict[Any, Any] | None = None,
) -> tuple[Tensor, Sides]:
    """The inference pass of a region: y, and the side values that are left. ``caches``: of the ops that go on from one, by position; they are used
    up. ``args`` and ``taken``: of ``run_forward``."""
    ops = _with_args(plan, region, args)
    sides = _sides_of(region, taken)

    def body() -> Tensor:
        y = x
        for group in region.groups:
            y = infer_group(group, ops[group.start - region.start : group.stop - region.start], y, sides, call_inputs)
        return y

    return Pass("inference", scales, caches, call=call).run(body), sides


def run_backward(
    plan: Plan,
    region: Region,
    contexts: list[Context],
    dy: Tensor,
    call_inputs: Mapping[str, Any],
    scales: Mapping[str, Any],
    sums: Mapping[str, Tensor] | None = None,
    taken: Sequence[Any] = (),
    call: dict[Any, Any] | None = None,
) -> BackwardResult:
    """The backward pass of a region. ``taken``: the gradients of side values that it takes.

    Used up are ``contexts``, which is emptied from its end, so that each goes when it has been used, and ``sums``: gradients so far, by the plan's
    ``arg_slots``, to which those of this pass are added.
    """
    start = region.start
    grads: list[list[Tensor | None]] = [[None] * len(names) for names in plan.arg_names[start : region.stop]]
    sides = _sides_of(region, taken)
    slots = frozenset(sums or ())
    state = Pass("backward", scales, sums=sums, call=call)

    def body() -> Tensor | None:
        d: Tensor | None = dy
        for group in reversed(region.groups):
            assert d is not None
            ctxs = contexts[group.start - start :]
            del contexts[group.start - start :]
            members = plan.ops[group.start : group.stop]
            d, grads[group.start - start : group.stop - start] = backward_group(group, members, ctxs, d, sides, call_inputs, slots)
        return d

    return BackwardResult(state.run(body), grads, state.amaxes, sides)


_EMPTY: Context = {}


def _with_args(plan: Plan, region: Region, args: Sequence[Tensor]) -> list[Op]:
    ops = list(plan.ops[region.start : region.stop])
    values = iter(args)
    for i, names in enumerate(plan.arg_names[region.start : region.stop]):
        if names:
            ops[i] = ops[i].with_(**{name: next(values) for name in names})
    return ops


def forward_group(group: Group, members: Sequence[Op], x: Tensor, sides: Sides, call_inputs: Mapping[str, Any]) -> tuple[Tensor, Sequence[Context]]:
    """y and the contexts of a group's forward; side values are taken from ``sides``, and put there."""
    values = _values(group.side_inputs, group.call_inputs, sides, call_inputs)
    if not group.opaque:
        check_takes(group.fusion, members, "forward", values)
    if group.fusion is not None:
        result = group.fusion.function(*members, x, **values)
    else:
        result = members[0].forward(x, **values)
    if not group.opaque:
        check_forward(members, result, sides=bool(group.side_outputs), fused=group.fusion is not None)
    if group.side_outputs:
        _put(result[2], sides)
    return result[0], result[1] if group.fusion is not None else (result[1],)


def backward_group(
    group: Group,
    members: Sequence[Op],
    ctxs: list[Context],
    dy: Tensor,
    sides: Sides,
    call_inputs: Mapping[str, Any],
    sums: Collection[str] = (),
) -> tuple[Tensor | None, Sequence[Any]]:
    """dx and, per op, the gradients of its parameters. ``ctxs`` are used up. ``sums``: names of those to which a pass may add gradients itself."""
    values = _values(group.side_outputs, group.call_inputs, sides, call_inputs)
    if not group.opaque:
        check_takes(group.fusion, members, "backward", values)
        for place, (op, ctx) in enumerate(zip(members, ctxs, strict=True)):
            ctxs[place] = KeptContext(op, ctx)
    if group.fusion is not None:
        result = group.fusion.function(*members, *ctxs, dy, **values)
    else:
        result = members[0].backward(ctxs[0], dy, **values)
    if not group.opaque:
        check_backward(members, result, sides=bool(group.side_inputs), fused=group.fusion is not None, sums=sums)
    if group.side_inputs:
        _put(result[2], sides)
    return result[0], result[1] if group.fusion is not None else (result[1],)


def infer_group(group: Group, members: Sequence[Op], x: Tensor, sides: Sides, call_inputs: Mapping[str, Any]) -> Tensor:
    """y of a group's inference."""
    if group.side_outputs:
        return forward_group(group, members, x, sides, call_inputs)[0]
    values = _values(group.side_inputs, group.call_inputs, sides, call_inputs)
    if not group.opaque:
        check_takes(group.fusion, members, "inference", values)
    y = group.fusion.function(*members, x, **values) if group.fusion else members[0].inference(x, **values)
    if not group.opaque:
        check_inference(members, y)
    return y


def _sides_of(region: Region, taken: Sequence[Any]) -> Sides:
    sides: Sides = {}
    for name, value in zip(region.takes, taken, strict=True):
        sides.setdefault(name, []).insert(0, value)  # what is taken first of a name lies last
    return sides


_NOTHING: dict[str, Any] = {}


def _values(names: Sequence[str], call_input_names: Sequence[str], sides: Sides, call_inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The side values that a group takes (the latest of each name; None for a gradient that nobody gave), and the values of the whole call."""
    if not names and not call_input_names:
        return _NOTHING
    return {**{name: sides[name].pop() if sides.get(name) else None for name in names}, **{name: call_inputs[name] for name in call_input_names}}


def _put(values: Mapping[str, Any], sides: Sides) -> None:
    for name, value in values.items():
        sides.setdefault(name, []).append(value)  # None too: what is taken next of the name would else be another's
