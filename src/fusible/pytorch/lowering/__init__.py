"""Ops as torch's own functions: what ``torch.export`` and ONNX take. One table, to which each file adds the ops that it lowers."""

from __future__ import annotations

from fusible.pytorch.lowering import attention, experts, normalization, pointwise, product
from fusible.pytorch.lowering.codes import constants_of, values_of
from fusible.pytorch.lowering.operators import as_operators
from fusible.pytorch.lowering.registry import lowered, lowers

__all__ = ["as_operators", "constants_of", "lowered", "lowers", "values_of"]
