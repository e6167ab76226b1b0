"""``fusible.convert``: the layers of any torch model compute by Fusible, in place."""

from __future__ import annotations

from fusible.facade import public_names as _public_names
from fusible.models.convert.conversion import conversion_report, convert
from fusible.models.convert.report import Layer, Report
from fusible.models.convert.states import load_scaling_states, scaling_states

__all__ = _public_names(globals())
