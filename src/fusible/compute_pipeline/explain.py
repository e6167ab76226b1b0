"""A plan as text: for each of the three passes the groups, who executes them, and the type on every edge."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from fusible.compute_pipeline.matching import Group
from fusible.compute_pipeline.plan import Plan
from fusible.compute_pipeline.regions import Region
from fusible.fusions import Fusion, registered
from fusible.nvte import PassKind, QuantizedType, Type
from fusible.ops import Op

__all__ = ["describe", "describe_misses", "describe_quantizers"]


def describe(plan: Plan) -> str:
    """The three passes, a line per group: its place, its ops, the types that pass between them, and the fused pass that replaces them.

    ``bf16|e4m3[3.x]`` is an edge on which bf16 arrives and is cast to E4M3, scaled by the slot ``3.x``. An op's parameters follow its name where
    the op asks for a type of theirs. ``none`` is a gradient that nobody wants. Where an executor that compiles cannot take a pass as one program, a
    line begins each program, and each stretch that is called as it stands.
    """
    forward, backward = _forward_edges(plan), _backward_edges(plan)
    recipe = plan.request.recipe
    lines = [f"{len(plan.ops)} ops, {len(plan.segments)} segments, recipe {recipe or 'none'}, activations {plan.activation}"]
    passes = [region for segment in plan.segments for region in segment.forward], [r for s in plan.segments for r in s.backward][::-1]
    lines += _section("forward", plan, passes[0], forward)
    lines += _section("backward", plan, passes[1], backward, reverse=True)
    lines += _section("inference", plan, plan.inferred, forward)
    return "\n".join(lines)


def describe_quantizers(plan: Plan) -> str:
    """What is quantized, and how: a line for each input, weight and gradient that a quantizer makes."""
    rows: list[str] = []
    for op in plan.ops:
        for name in (*op.forward_names, *op.backward_names):
            type = op.type_of(name)
            if isinstance(type, QuantizedType) and not _passed_on(plan, op, name):
                how = f"delayed scaling to {type.dtype}" if type.delayed else repr(type.descriptor)
                rows.append(f"  {op.position}.{name}  {how}")
    return "\n".join(["quantizers", *rows] if rows else ["quantizers: none"])


def _passed_on(plan: Plan, op: Op, name: str) -> bool:
    """Whether the op is transparent and takes a tensor in its neighbour's type: then the neighbour has the quantizer."""
    neighbour = op.position + {"x": 1, "dy": -1}.get(name, 0)
    same = 0 <= neighbour < len(plan.ops) and plan.ops[neighbour].type_of(name) == op.type_of(name)
    return op.transparent and name in ("x", "dy") and same


def describe_misses(plan: Plan) -> str:
    """Which fusions matched all but the last of their ops, and what stood there; and which matched where another one is."""
    lines: list[str] = []
    passes: tuple[tuple[PassKind, tuple[Group, ...]], ...] = (("forward", plan.forward), ("backward", plan.backward))
    for kind, groups in passes:
        fused = {i: group for group in groups if group.fusion is not None for i in range(group.start, group.stop)}
        chosen = {(group.start, group.stop, group.fusion) for group in groups}
        for fusion in registered(kind):
            lines += [f"  {kind}: {line}" for line in _missed(plan.ops, fusion, fused, chosen)]
    return "\n".join(["fusions that did not match", *lines] if lines else ["fusions that did not match: none came near"])


def _missed(ops: Sequence[Op], fusion: Fusion, fused: Mapping[int, Group], chosen: Container[Any]) -> Iterator[str]:
    length = len(fusion.pattern)
    for start in range(len(ops)):
        window = ops[start : start + length]
        if (start, start + length, fusion) in chosen or any(type(op) not in fusion.pattern[i] for i, op in enumerate(window[: length - 1])):
            continue
        names = " + ".join(op.title for op in window[: length - 1])
        places = str(start) if length == 2 else f"{start}-{start + length - 2}"
        wanted = " or ".join(sorted(t.__name__ for t in fusion.pattern[-1]))
        if len(window) < length:
            if len(window) == length - 1 and start not in fused:
                yield f"{fusion.name} at {places} ({names}): it wants {wanted} next, and that is the end"
        elif type(window[-1]) not in fusion.pattern[-1]:
            if start not in fused:
                yield f"{fusion.name} at {places} ({names}): it wants {wanted} next, and {start + length - 1} is {window[-1]!r}"
        else:
            others = [fused[i] for i in range(start, start + length) if i in fused]
            users = [other for other in others if other.fusion is not None and other.fusion.opaque]
            other = next(iter(users or others), None)
            unfit = "its types are others" if fusion.when is not None and not fusion.when(window) else "side values of one name meet in it"
            what = f"{other.fusion.name} has {_places(other)}" if other and other.fusion else unfit
            if other is None or users or other.stop - other.start < length or (other.start, other.stop) == (start, start + length):
                yield f"{fusion.name} at {start}-{start + length - 1}: {what}"


def _places(group: Group) -> str:
    return str(group.start) if group.stop == group.start + 1 else f"{group.start}-{group.stop - 1}"


def _edge(came: Type, asked: Type | None) -> str:
    return str(came) if asked is None or asked == came else f"{came}|{asked}"


def _forward_edges(plan: Plan) -> list[str]:
    """Edge ``i`` enters op ``i``; the last leaves the pipeline."""
    came: list[Type] = [plan.request.activation, *(op.y_dtype for op in plan.ops)]
    return [_edge(came[i], op.x_dtype) for i, op in enumerate(plan.ops)] + [str(came[-1])]


def _backward_edges(plan: Plan) -> list[str]:
    """Edge ``i`` leaves op ``i``; the last is the gradient of the pipeline's output."""
    if not plan.ops:
        return [str(plan.activation)]
    came: list[Type] = [*(op.dx_dtype for op in plan.ops), plan.ops[-1].y_dtype]
    edges = [str(came[0]) if plan.ops[0].wants("x") else "none"]
    for i, op in enumerate(plan.ops):
        wanted = i + 1 == len(plan.ops) or plan.ops[i + 1].wants("x")
        edges.append(_edge(came[i + 1], op.dy_dtype) if wanted else "none")
    return edges


def _name(op: Op) -> str:
    types = [op.type_of(op.parts.get(name, (name,))[0]) for name in op.arg_names]
    shown = ", ".join(f"{name} {type}" for name, type in zip(op.arg_names, types, strict=True) if type is not None)
    return f"{op.title}({shown})" if shown else op.title


def _section(title: str, plan: Plan, regions: Sequence[Region], edges: Sequence[str], *, reverse: bool = False) -> list[str]:
    rows = [[_row(plan.ops, group, edges, reverse) for group in (region.groups[::-1] if reverse else region.groups)] for region in regions]
    widths = [max((len(row[column]) for of_region in rows for row in of_region), default=0) for column in range(3)]
    lines = ["", title]
    for region, of_region, heading in zip(regions, rows, _headings(plan, regions), strict=True):
        lines += [heading] if heading and region.groups else []
        lines += ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in of_region]
    return lines


def _row(ops: Sequence[Op], group: Group, edges: Sequence[str], reverse: bool) -> tuple[str, str, str, str]:
    members, passed = ops[group.start : group.stop], edges[group.start : group.stop + 1]
    names = [op.title if reverse else _name(op) for op in members]
    if reverse:
        names, passed = names[::-1], passed[::-1]
    return _places(group), " + ".join(names), " -> ".join(passed), group.fusion.name if group.fusion else ""


def _headings(plan: Plan, regions: Sequence[Region]) -> list[str]:
    """The line above each region of a pass; empty where the pass is not cut, or its executor compiles nothing."""
    if not plan.request.whole or not plan.opaque:
        return [""] * len(regions)
    programs = count(1)
    return [f" program {next(programs)}" if region.called is None else f" called, not compiled: {region.called}" for region in regions]
