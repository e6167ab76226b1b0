"""Plans: type inference, fusion, segments, state, and their execution."""

from __future__ import annotations

from fusible.compute_pipeline.communication import *
from fusible.compute_pipeline.context_parallel import *
from fusible.compute_pipeline.execution import *
from fusible.compute_pipeline.expert_parallel import *
from fusible.compute_pipeline.explain import *
from fusible.compute_pipeline.inference import StateLayout, role_of
from fusible.compute_pipeline.matching import *
from fusible.compute_pipeline.partial_pass import *
from fusible.compute_pipeline.pipeline import *
from fusible.compute_pipeline.plan import Plan, QuantizedArg, Segment
from fusible.compute_pipeline.regions import Region
from fusible.compute_pipeline.request import *
from fusible.compute_pipeline.sharded_rows import *
from fusible.compute_pipeline.sides import Extras, route
from fusible.compute_pipeline.tensor_parallel import *
from fusible.facade import public_names as _public_names
from fusible.fusions import epoch as fusion_epoch

__all__ = _public_names(globals())
