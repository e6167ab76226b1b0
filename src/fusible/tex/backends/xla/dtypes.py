"""Which lazy dtype stands for which of torch's."""

from __future__ import annotations

from typing import Any

import torch

from fusible import lazy
from fusible.errors import DTypeError, expected
from fusible.tex.protocol import register_dtypes, to_torch

__all__ = ["FROM_TORCH", "to_lazy"]

FROM_TORCH: dict[torch.dtype, lazy.dtype] = {
    torch.uint8: lazy.uint8,
    torch.int16: lazy.int16,
    torch.int32: lazy.int32,
    torch.int64: lazy.int64,
    torch.float32: lazy.float32,
    torch.float16: lazy.float16,
    torch.bfloat16: lazy.bfloat16,
    torch.float8_e4m3fn: lazy.float8,
    torch.float8_e5m2: lazy.float8e5m2,
    torch.bool: lazy.bool,
}
register_dtypes({of: dtype for dtype, of in FROM_TORCH.items()})


def to_lazy(dtype: Any) -> lazy.dtype:
    """The lazy dtype of a lazy dtype, a ``torch.dtype``, a ``DType`` (NVIDIA's or ours) or its integer value."""
    if isinstance(dtype, lazy.dtype):
        return dtype
    found = FROM_TORCH.get(to_torch(dtype))
    if found is None:
        raise DTypeError(expected("a type that lazy tensors have", of="a tex call on lazy tensors", got=repr(dtype), do="cast to another type"))
    return found
