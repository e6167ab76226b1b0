"""Which Python objects name which native element type, and which types are tensors; read once, when a native module is loaded."""

from __future__ import annotations

import torch

__all__ = ["NAMES", "TABLE", "TENSORS"]

NAMES: dict[str, int] = {
    "uint8": 0,
    "int16": 1,
    "int32": 2,
    "int64": 3,
    "float32": 4,
    "float16": 5,
    "bfloat16": 6,
    "float8_e4m3fn": 7,
    "float8_e5m2": 8,
    "float8_e8m0fnu": 9,
    "float4_e2m1fn_x2": 10,
}
"""Native number of each element type by its name; the numbers are those of ``tex.DType`` and of ``dtype.hpp``."""

TABLE: dict[torch.dtype, int] = {getattr(torch, name): number for name, number in NAMES.items() if hasattr(torch, name)}
"""Native number of each dtype of torch; a torch release that lacks one simply does not list it."""

TENSORS: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
"""Types whose instances are read by torch's exchange interface, where this torch has one. An instance of any other type is asked by name."""
