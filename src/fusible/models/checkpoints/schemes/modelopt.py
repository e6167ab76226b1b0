"""Checkpoints of NVIDIA's Model Optimizer: FP8 and NVFP4, with scales of activations that its calibration found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusible.models.checkpoints.layouts import ChannelFloat8, MXFloat8, PackedNVFloat4, TensorFloat8, WeightLayout
from fusible.models.checkpoints.schemes.scheme import Config, Scheme, unknown

__all__ = ["MODELOPT", "NVFP4_BYTES", "TENSORS"]

_SCALE = "_scale"
TENSORS, CHANNELS, MXFP8_ROWS = TensorFloat8(_SCALE), ChannelFloat8(_SCALE), MXFloat8(_SCALE)
NVFP4_BYTES = PackedNVFloat4("", _SCALE, "_scale_2")

_ALGORITHMS: dict[str, tuple[WeightLayout, ...]] = {
    "FP8": (TENSORS,),
    "FP8_PER_CHANNEL_PER_TOKEN": (CHANNELS,),
    "MXFP8": (MXFP8_ROWS,),
    "NVFP4": (NVFP4_BYTES,),
    "MIXED_PRECISION": (TENSORS, CHANNELS, MXFP8_ROWS, NVFP4_BYTES),
}
_WRITTEN: Mapping[WeightLayout, str] = {layouts[0]: name for name, layouts in reversed(_ALGORITHMS.items())}


def _fits(config: Config) -> bool:
    producer = config.get("producer")
    return config.get("quant_method") == "modelopt" or (isinstance(producer, Mapping) and producer.get("name") == "modelopt")


def _layouts(config: Config) -> Sequence[WeightLayout]:
    name = config.get("quant_algo")
    if name not in _ALGORITHMS:
        raise unknown("quant_algo", list(_ALGORITHMS), name)
    return _ALGORITHMS[name]


def _written(layout: WeightLayout, modules: Sequence[str]) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": _WRITTEN[layout], "producer": {"name": "modelopt"}, "ignore": list(modules)}


MODELOPT = Scheme(
    name="ModelOpt",
    fits=_fits,
    layouts=_layouts,
    high_precision=lambda config: config.get("ignore") or config.get("exclude_modules") or (),
    written=_written,
)
