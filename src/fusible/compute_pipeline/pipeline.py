"""``ComputePipeline``: a list of ops and the plans made of it."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.compute_pipeline.inference import StateLayout, delayed_recipe, state_layout
from fusible.compute_pipeline.plan import Plan, build_plan
from fusible.compute_pipeline.request import PlanRequest
from fusible.errors import DTypeError, expected
from fusible.locks import Lock
from fusible.ops import Op
from fusible.quantized import Recipe

__all__ = ["ComputePipeline"]


class ComputePipeline:
    """Plans for a list of ops: each built once per request, then found again. Safe under threads; the ops are never written to.

    ``plans_built`` counts the plans made so far.
    """

    def __init__(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if not isinstance(op, Op):
                raise DTypeError(expected("fusible.ops.Op", of="a pipeline's list", got=type(op).__qualname__, do="give operations"))
        self.ops = tuple(ops)
        self.state: StateLayout = state_layout(self.ops)
        self.plans_built = 0
        self._plans: dict[PlanRequest, Plan] = {}
        self._lock = Lock()

    def plan(self, request: PlanRequest) -> Plan:
        """The plan for ``request``. Raises ``ShapeError`` or ``ArgumentError`` where the ops cannot serve it; nothing is cached then."""
        plan = self._plans.get(request)
        if plan is None:
            with self._lock:
                plan = self._plans.get(request)
                if plan is None:
                    plan = self._plans[request] = build_plan(self.ops, request)
                    self.plans_built += 1
        return plan

    def observes(self, recipe: Recipe | None) -> bool:
        """Whether plans under ``recipe`` observe amaxes, as some of their tensors are under delayed scaling."""
        return bool(self.state) and delayed_recipe(self.ops, recipe) is not None
