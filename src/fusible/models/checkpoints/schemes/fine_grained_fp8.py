"""DeepSeek's FP8 in blocks of 128x128, as transformers' ``FineGrainedFP8Config`` has it (``quant_method: fp8``), with its kin: one scale a tensor,
and MXFP8 as blocks of 1x32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusible.models.checkpoints.layouts import MXFloat8, TensorFloat8, TileFloat8, WeightLayout
from fusible.models.checkpoints.schemes.scheme import Config, Scheme, unknown

__all__ = ["FINE_GRAINED_FP8", "MXFP8_BLOCKS", "TILES"]

_SCALE, _PLAIN_SCALE = "_scale_inv", "_scale"
_BLOCKS = ([128, 128], [1, 32], None)
_EXPONENTS = {"float": False, "ue8m0": True}

TILES = TileFloat8(_SCALE)
"""Scales of fp32, as DeepSeek-V3 has them."""

MXFP8_BLOCKS = MXFloat8(_SCALE, torch.float8_e8m0fnu)


def _layouts(config: Config) -> Sequence[WeightLayout]:
    blocks, form = config.get("weight_block_size"), config.get("scale_fmt") or "float"
    if blocks not in _BLOCKS:
        raise unknown("weight_block_size", [str(each) for each in _BLOCKS], blocks)
    if form not in _EXPONENTS:
        raise unknown("scale_fmt", list(_EXPONENTS), form)
    tiles = TileFloat8(_SCALE, torch.float8_e8m0fnu) if _EXPONENTS[form] else TILES
    return tiles, MXFP8_BLOCKS, TensorFloat8(_SCALE), TensorFloat8(_PLAIN_SCALE)


def _written(layout: WeightLayout, modules: Sequence[str]) -> dict[str, Any]:
    exponents = {"scale_fmt": "ue8m0"} if getattr(layout, "scale_dtype", torch.float32) is not torch.float32 else {}
    blocks = [128, 128] if isinstance(layout, TileFloat8) else [1, 32] if isinstance(layout, MXFloat8) else None
    told = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": blocks, **exponents}
    return {**told, "modules_to_not_convert": list(modules)}


FINE_GRAINED_FP8 = Scheme(
    name="fine-grained FP8",
    fits=lambda config: config.get("quant_method") == "fp8",
    layouts=_layouts,
    high_precision=lambda config: config.get("modules_to_not_convert") or config.get("ignored_layers") or (),
    written=_written,
)
