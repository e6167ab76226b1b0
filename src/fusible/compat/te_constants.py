"""``transformer_engine.pytorch.constants``: element types, and the places of tensors and sizes of blocks that its quantization is told by."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from fusible.tex import DType
from fusible.tex.enums import FP8BwdTensors, FP8FwdTensors

__all__ = [
    "DType",
    "FP8BwdTensorIdx",
    "FP8FwdTensorIdx",
    "MXFP8_BLOCK_SCALING_SIZE",
    "NVFP4_BLOCK_SCALING_SIZE",
    "TE_DType",
    "TE_DType_To_Torch",
]

TE_DType = {
    torch.uint8: DType.kByte,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}
"""By torch's dtype: the element type by which tex knows it."""
TE_DType_To_Torch = {value: key for key, value in TE_DType.items()}

FP8FwdTensorIdx = SimpleNamespace(**{name: int(place) for name, place in FP8FwdTensors.__members__.items()})
FP8BwdTensorIdx = SimpleNamespace(**{name: int(place) for name, place in FP8BwdTensors.__members__.items()})

MXFP8_BLOCK_SCALING_SIZE = 32
NVFP4_BLOCK_SCALING_SIZE = 16
"""Elements that share a scale."""
