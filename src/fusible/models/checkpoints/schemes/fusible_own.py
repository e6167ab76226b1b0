"""Fusible's own checkpoints, which hold quantized tensors of every format with all that they have: column-wise copies, quantizers, options."""

from __future__ import annotations

from fusible.models.checkpoints.layouts import OwnLayout
from fusible.models.checkpoints.schemes.scheme import Scheme

__all__ = ["FUSIBLE", "OWN"]

OWN = OwnLayout()

FUSIBLE = Scheme(
    name="Fusible",
    fits=lambda config: config.get("quant_method") == "fusible",
    layouts=lambda config: (OWN,),
    high_precision=lambda config: config.get("modules_to_not_convert") or (),
    written=lambda layout, modules: {"quant_method": "fusible", "modules_to_not_convert": list(modules)},
)
