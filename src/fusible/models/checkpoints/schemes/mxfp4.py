"""gpt-oss: the weights of all experts of a layer in one tensor of MXFP4, as transformers' ``Mxfp4Config`` has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.models.checkpoints.layouts import PackedMXFloat4, WeightLayout
from fusible.models.checkpoints.schemes.scheme import Scheme

__all__ = ["EXPERTS", "MXFP4"]

EXPERTS = PackedMXFloat4("_blocks", "_scales", grouped=True)


def _written(layout: WeightLayout, modules: Sequence[str]) -> dict[str, Any]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(modules)}


MXFP4 = Scheme(
    name="MXFP4 of gpt-oss",
    fits=lambda config: config.get("quant_method") == "mxfp4",
    layouts=lambda config: (EXPERTS,),
    high_precision=lambda config: config.get("modules_to_not_convert") or (),
    written=_written,
)
