"""Checkpoints of ``compressed-tensors``, which vLLM and transformers read: FP8 by tensor, channel or block, MXFP8, NVFP4, MXFP4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusible.models.checkpoints.layouts import ChannelFloat8, MXFloat8, PackedMXFloat4, PackedNVFloat4, TensorFloat8, TileFloat8, WeightLayout
from fusible.models.checkpoints.schemes.scheme import Config, Scheme, unknown

__all__ = ["CHANNELS", "COMPRESSED_TENSORS", "MXFP4_ROWS", "MXFP8_ROWS", "NVFP4_ROWS", "TENSORS"]

_SCALE = "_scale"
TENSORS, CHANNELS, TILES = TensorFloat8(_SCALE), ChannelFloat8(_SCALE), TileFloat8(_SCALE)
MXFP8_ROWS = MXFloat8(_SCALE)
NVFP4_ROWS = PackedNVFloat4("_packed", _SCALE, "_global_scale", inverse=True)
MXFP4_ROWS = PackedMXFloat4("_packed", _SCALE)

_FP8 = (TENSORS, CHANNELS, TILES)
_FORMATS: dict[str, tuple[WeightLayout, ...]] = {
    "dense": (),
    "float-quantized": _FP8,
    "naive-quantized": _FP8,
    "nvfp4-pack-quantized": (NVFP4_ROWS,),
    "mxfp4-pack-quantized": (MXFP4_ROWS,),
    "mxfp8-quantized": (MXFP8_ROWS,),
    "mixed-precision": (*_FP8, MXFP8_ROWS, NVFP4_ROWS, MXFP4_ROWS),
}
"""By the name of the format, or of each group's where they are mixed, how weights may be stored."""


def _numbers(bits: int, strategy: str, *, dynamic: Any = False, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": dynamic, **others}


_BYTES = {"group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
_NVFP4 = {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
_ROWS_OF_8_BITS = _numbers(8, "token", dynamic=True)

_GROUPS: Mapping[WeightLayout, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    TENSORS: ("float-quantized", _numbers(8, "tensor"), _ROWS_OF_8_BITS),
    CHANNELS: ("float-quantized", _numbers(8, "channel"), _ROWS_OF_8_BITS),
    TILES: ("float-quantized", _numbers(8, "block", block_structure=[128, 128]), _numbers(8, "group", dynamic=True, group_size=128)),
    MXFP8_ROWS: ("mxfp8-quantized", _numbers(8, "group", **_BYTES), _numbers(8, "group", dynamic=True, **_BYTES)),
    NVFP4_ROWS: ("nvfp4-pack-quantized", _numbers(4, "tensor_group", **_NVFP4), None),
    MXFP4_ROWS: ("mxfp4-pack-quantized", _numbers(4, "group", **_BYTES), None),
}
"""The format, weights and activations that a config is written with. Activations of NVFP4 would need a scale that only data can give, and those of
MXFP4 few models bear: both stay in high precision (W4A16)."""

_FOLDED = ("weight_input", "weight_output")
"""Where a transform is applied that weights have in them already; elsewhere it is a product of its own, which the model's layers do not compute."""

_DEQUANTIZED = (MXFP8_ROWS, NVFP4_ROWS, MXFP4_ROWS)
"""What transformers dequantizes as it loads, to the dtype of its model: these configs say ``dequantize``. It would at the first call else, by
compressed-tensors (0.15) and to bf16, so that models in fp32 and fp16 failed; and T5 and its kin, whose initialization looks at ``weight`` of each
layer, failed earlier at names like ``weight_packed``. Other readers do not look at the entry."""


def _layouts(config: Config) -> Sequence[WeightLayout]:
    names: set[Any] = {config.get("format")}
    groups = _groups(config)
    names |= {group["format"] for group in groups if group.get("format") is not None}
    for name in names:
        if name not in _FORMATS:
            raise unknown("format", list(_FORMATS), name)
    for group in groups:
        weights = group.get("weights")
        if isinstance(weights, Mapping) and weights.get("symmetric") is False:
            raise unknown("symmetric of weights", ["true"], False)
    transforms = config.get("transform_config")
    for transform in _groups(transforms) if isinstance(transforms, Mapping) else []:
        applied = transform.get("apply")
        places = [place.get("location") if isinstance(place, Mapping) else place for place in (applied if isinstance(applied, list) else [applied])]
        if other := [place for place in places if place not in _FOLDED]:
            raise unknown("location of a transform", _FOLDED, other[0])
    return tuple(dict.fromkeys(layout for name in names for layout in _FORMATS[name]))


def _groups(config: Config) -> list[Mapping[str, Any]]:
    groups = config.get("config_groups")
    return [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []


def _written(layout: WeightLayout, modules: Sequence[str]) -> dict[str, Any]:
    form, weights, activations = _GROUPS[layout]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None, "format": form}
    told = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "config_groups": {"group_0": group}}
    dequantize = {"dequantize": True} if layout in _DEQUANTIZED else {}
    return {**told, "ignore": list(modules), "kv_cache_scheme": None, **dequantize}


COMPRESSED_TENSORS = Scheme(
    name="compressed-tensors",
    fits=lambda config: config.get("quant_method") == "compressed-tensors",
    layouts=_layouts,
    high_precision=lambda config: config.get("ignore") or (),
    written=_written,
)
