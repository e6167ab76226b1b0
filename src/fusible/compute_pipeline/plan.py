"""The plan: what the pipeline makes of a list of ops for one request. Immutable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fusible.compute_pipeline.inference import StateLayout, activation_type, delayed_recipe, infer_types, state_layout
from fusible.compute_pipeline.matching import Group, group_ops, needs_backward
from fusible.compute_pipeline.regions import Region, regions_of
from fusible.compute_pipeline.request import PlanRequest
from fusible.compute_pipeline.sides import OpenSides
from fusible.errors import ArgumentError, expected
from fusible.fusions import registered
from fusible.nvte import DType, QuantizedType, Type, is_quantized_type
from fusible.ops import Op
from fusible.ops.protocols import CachedKeys, Incremental
from fusible.quantized import DelayedScaling

__all__ = ["Plan", "QuantizedArg", "Segment", "build_plan"]

_SHORTEST_SEGMENT = 8
"""Ops. An autograd node costs some 25 us of Python (Zen 4, torch 2.13), as much as several small ops."""


@dataclass(frozen=True)
class QuantizedArg:
    """A parameter that the passes take in an 8-bit type: its place among the parameters of all ops, and the type. ``parts``: the types of its parts
    along the first dimension, where each is quantized by itself; the type is then that of the first. ``stored``: the type in which it is stored."""

    place: int
    type: QuantizedType
    stored: Type
    parts: tuple[QuantizedType, ...] = ()

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of the scales by which it is quantized."""
        return tuple(type.slot for type in self.parts or (self.type,) if type.slot)


@dataclass(frozen=True, eq=False)
class Segment:
    """A stretch ``[start, stop)`` of the ops that forward and backward both cover with whole groups: one autograd node."""

    start: int
    stop: int
    forward: tuple[Region, ...]
    backward: tuple[Region, ...]
    """In the order of the ops; executed from the last to the first."""
    state: StateLayout
    """The scales that its ops read."""
    args: slice
    """The places of its ops' parameters among those of all ops."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Bound copies of the ops, every type resolved; the three fused lists; the segments; the state that the passes read and write."""

    request: PlanRequest
    ops: tuple[Op, ...]
    arg_names: tuple[tuple[str, ...], ...]
    arg_slots: tuple[str, ...]
    """``<position>.<name>`` of each parameter of all ops."""
    arg_types: tuple[Type, ...]
    """The type of each parameter of all ops, as the passes take it."""
    quantized_args: tuple[QuantizedArg, ...]
    """The parameters that passes take in an 8-bit type: quantized before a pass, unless they are held so."""
    plain_args: list[tuple[Type, None]]
    """What ``nvte.flatten`` would say of the parameters, where none is in 8 bits: there is nothing to take apart."""
    activation: DType
    forward: tuple[Group, ...]
    backward: tuple[Group, ...]
    inference: tuple[Group, ...]
    segments: tuple[Segment, ...]
    inferred: tuple[Region, ...]
    """The regions of the inference."""
    call_inputs: tuple[str, ...]
    state: StateLayout
    delayed: DelayedScaling | None
    """The options of the delayed scaling that the state belongs to."""
    caches: Mapping[int, CachedKeys]
    """By position: what each op keeps in a cache of keys and values, of the ops that can go on from one."""
    uncached: Op | None
    """The first op that looks at whole sequences and cannot, if there is one."""
    out_width: int | None
    """The columns of y; None where they are not known before the call."""
    opaque: bool
    """Whether some of it computes elsewhere than by nvte's functions, or has effects: that cannot be replayed or compiled."""
    fast_path: bool
    """Whether it hangs on x and the parameters alone, one in high precision as the other: each pass of a segment is one region, which nothing else
    goes into or comes out of."""

    @property
    def first_backward(self) -> int:
        """The first op that backward comes by."""
        return self.backward[0].start if self.backward else len(self.ops)


def build_plan(ops: Sequence[Op], request: PlanRequest) -> Plan:
    """Resolve the types, fuse each pass, cut segments. Raises ``ShapeError`` for a width that the ops cannot take."""
    widths: list[int | None] = [request.width]
    for op in ops:
        widths.append(op.width(widths[-1]))
    bound = _bind(ops, request, widths)
    _check_sides(bound, request)
    delayed = delayed_recipe(ops, request.recipe)
    state = state_layout(ops) if delayed is not None else StateLayout((), ())
    first = next((i for i, op in enumerate(bound) if needs_backward(op)), len(bound))
    forward, backward, inference = (
        group_ops(bound, registered(kind), first if kind == "backward" else 0, (entry for entry in request.fused if entry[2].kind == kind))
        for kind in ("forward", "backward", "inference")
    )
    arg_types, quantized_args = _arg_types(bound, request)
    opaque = any(fusion.opaque for _, _, fusion in request.fused) or any(op.direct_only for op in bound)
    call_inputs = _call_inputs(bound)
    bound_types = (value for op in bound for value in vars(op).values())
    alone = not (opaque or call_inputs or request.sides or request.outputs)
    counts = [0, *accumulate(len(op.arg_names) for op in ops)]
    return Plan(
        request=request,
        ops=bound,
        arg_names=tuple(op.arg_names for op in ops),
        arg_slots=tuple(f"{i}.{name}" for i, op in enumerate(ops) for name in op.arg_names),
        arg_types=arg_types,
        quantized_args=quantized_args,
        plain_args=[(type, None) for type in arg_types],
        activation=activation_type(request),
        forward=forward,
        backward=backward,
        inference=inference,
        segments=_segments(bound, forward, backward, state, counts, request),
        inferred=regions_of("inference", bound, 0, len(bound), inference, state, counts, request.whole),
        call_inputs=call_inputs,
        state=state,
        delayed=delayed,
        caches={op.position: op.cached for op in bound if isinstance(op, Incremental) and op.cached},
        uncached=next((op for op in bound if not _goes_on(op)), None),
        out_width=widths[-1],
        opaque=opaque,
        fast_path=alone and not any(isinstance(type, QuantizedType) for type in (*arg_types, *bound_types)),
    )


def _bind(ops: Sequence[Op], request: PlanRequest, widths: Sequence[int | None]) -> tuple[Op, ...]:
    needed, sides = request.x_grad, OpenSides(request.sides)
    marked: list[Op] = []
    for i, op in enumerate(ops):
        unwanted = {name for name, (_, grad) in zip(op.arg_names, request.args[i], strict=True) if not grad}
        taken = {name: sides.take(name, needed) for name in op.side_inputs}
        unwanted.update(name for name, grad in taken.items() if not grad)
        if not needed:
            unwanted.add("x")
        needed = needed or any(grad for _, grad in request.args[i]) or any(taken.values())
        sides.give(op.side_outputs, needed)
        marked.append(op.with_(unwanted=frozenset(unwanted), training=request.training[i], position=i, x_width=widths[i]))
    return tuple(op.with_(**types) for op, types in zip(marked, infer_types(marked, request), strict=True))


def _arg_types(ops: Sequence[Op], request: PlanRequest) -> tuple[tuple[Type, ...], tuple[QuantizedArg, ...]]:
    types: list[Type] = []
    quantized: list[QuantizedArg] = []
    for op, args in zip(ops, request.args, strict=True):
        for name, (stored, _) in zip(op.arg_names, args, strict=True):
            parts = op.parts.get(name, ())
            asked = op.type_of(parts[0] if parts else name)
            if isinstance(asked, QuantizedType) and op.override != "high_precision":
                of_parts = tuple(op.type_of(part) for part in parts)
                quantized.append(QuantizedArg(len(types), asked, stored, of_parts))  # pyright: ignore[reportArgumentType] - they ask alike
                stored = asked
            types.append(stored)
    return tuple(types), tuple(quantized)


def _check_sides(ops: Sequence[Op], request: PlanRequest) -> None:
    open_ = OpenSides(request.sides)
    for op in ops:
        for name in op.side_inputs:
            if open_.take(name) is None:
                raise ArgumentError(
                    expected(f"an earlier op with the side output {name!r}", of=f"{op!r}", got="none", do="put the op that gives it before this one")
                )
        open_.give(op.side_outputs, op)
    for name in request.outputs:
        if open_.take(name) is None:
            raise ArgumentError(expected("a side output", of="what a pipeline returns", got=repr(name), do="name one that no later op takes"))
    if open_.open:
        raise ArgumentError(expected("a later op that takes it", of=f"the side output {open_.open[-1][0]!r}", got="none", do="close what was begun"))


def _goes_on(op: Op) -> bool:
    """Whether the op's inference on the further tokens of sequences is what it is on whole ones."""
    return op.goes_on if isinstance(op, Incremental) else "sequences" not in op.call_inputs


def _call_inputs(ops: Sequence[Op]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for op in ops for name in op.call_inputs))


def _segments(
    ops: Sequence[Op], forward: tuple[Group, ...], backward: tuple[Group, ...], state: StateLayout, counts: Sequence[int], request: PlanRequest
) -> tuple[Segment, ...]:
    """Cut at every place that no group and no side value spans and where what passes is not quantized, but leave no segment too short."""
    whole = request.whole or bool(request.sides or request.outputs)
    inside = {i for group in (*forward, *backward) for i in range(group.start + 1, group.stop)}
    cuts = [0]
    live = 0
    for i in range(1, len(ops)):
        live += len(ops[i - 1].side_outputs) - len(ops[i - 1].side_inputs)
        quantized = is_quantized_type(ops[i - 1].y_dtype) or is_quantized_type(ops[i].dx_dtype)
        long_enough = min(i - cuts[-1], len(ops) - i) >= _SHORTEST_SEGMENT
        if long_enough and not (whole or live or quantized or i in inside):
            cuts.append(i)
    segments: list[Segment] = []
    for start, stop in zip(cuts, [*cuts[1:], len(ops)], strict=True):
        own = state.between(start, stop)
        of_forward, of_backward = ([group for group in groups if start <= group.start < stop] for groups in (forward, backward))
        segments.append(
            Segment(
                start,
                stop,
                regions_of("forward", ops, start, stop, of_forward, own, counts, request.whole),
                regions_of("backward", ops, start, stop, of_backward, own, counts, request.whole),
                own,
                slice(counts[start], counts[stop]),
            )
        )
    return tuple(segments)
