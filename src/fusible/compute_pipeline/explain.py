"""A plan as text: for each of the three passes the groups, who executes them, and the type on every edge."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.compute_pipeline.matching import Group
from fusible.compute_pipeline.plan import Plan
from fusible.nvte import Type
from fusible.ops import Op

__all__ = ["describe"]


def describe(plan: Plan) -> str:
    """The three passes, a line per group: its place, its ops, the types that pass between them, and the fused pass that replaces them.

    ``bf16|e4m3[3.x]`` is an edge on which bf16 arrives and is cast to E4M3, scaled by the slot ``3.x``. An op's parameters follow its name where
    the op asks for a type of theirs. ``none`` is a gradient that nobody wants.
    """
    forward, backward = _forward_edges(plan), _backward_edges(plan)
    recipe = plan.request.recipe
    lines = [f"{len(plan.ops)} ops, {len(plan.segments)} segments, recipe {recipe or 'none'}, activations {plan.activation}"]
    lines += _section("forward", plan.ops, plan.forward, forward)
    lines += _section("backward", plan.ops, tuple(reversed(plan.backward)), backward, reverse=True)
    lines += _section("inference", plan.ops, plan.inference, forward)
    return "\n".join(lines)


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
    types = [getattr(op, f"{name}_dtype", None) for name in op.arg_names]
    shown = ", ".join(f"{name} {type}" for name, type in zip(op.arg_names, types, strict=True) if type is not None)
    return f"{type(op).__name__}({shown})" if shown else type(op).__name__


def _section(title: str, ops: Sequence[Op], groups: Sequence[Group], edges: Sequence[str], *, reverse: bool = False) -> list[str]:
    rows = []
    for group in groups:
        members, passed = ops[group.start : group.stop], edges[group.start : group.stop + 1]
        names = [type(op).__name__ if reverse else _name(op) for op in members]
        if reverse:
            names, passed = names[::-1], passed[::-1]
        places = str(group.start) if group.stop == group.start + 1 else f"{group.start}-{group.stop - 1}"
        rows.append((places, " + ".join(names), " -> ".join(passed), group.fusion.name if group.fusion else ""))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    return ["", title, *("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows)]
