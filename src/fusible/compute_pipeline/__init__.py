"""Plans: type inference, fusion, segments, state, and their execution."""

from __future__ import annotations

from fusible.compute_pipeline.execution import BackwardResult, ForwardResult, quantize_args, run_backward, run_forward, run_inference
from fusible.compute_pipeline.explain import describe, describe_misses, describe_quantizers
from fusible.compute_pipeline.inference import StateLayout
from fusible.compute_pipeline.matching import Group, group_ops, needs_backward, outer_sides
from fusible.compute_pipeline.pipeline import ComputePipeline
from fusible.compute_pipeline.plan import Plan, QuantizedArg, Segment
from fusible.compute_pipeline.regions import Region
from fusible.compute_pipeline.request import PlanRequest
from fusible.compute_pipeline.sharded_rows import sharded_rows
from fusible.compute_pipeline.sides import Extras, route, routes_of
from fusible.compute_pipeline.stretch import run_stretch, run_stretch_backward
from fusible.fusions import epoch as fusion_epoch

__all__ = [
    "BackwardResult",
    "ComputePipeline",
    "Extras",
    "ForwardResult",
    "Group",
    "Plan",
    "PlanRequest",
    "QuantizedArg",
    "Region",
    "Segment",
    "StateLayout",
    "describe",
    "describe_misses",
    "describe_quantizers",
    "fusion_epoch",
    "group_ops",
    "needs_backward",
    "outer_sides",
    "quantize_args",
    "route",
    "routes_of",
    "run_backward",
    "run_forward",
    "run_inference",
    "run_stretch",
    "run_stretch_backward",
    "sharded_rows",
]
