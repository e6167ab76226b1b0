"""Transposes of FP8 bytes."""

from __future__ import annotations

from typing import Any

from fusible.tex.backends.torch_backend.fp8 import transpose_bytes
from fusible.tex.interface.transpose import Transpose
from fusible.tex.protocol import check_bytes, check_shape, transposed_shape

__all__ = ["TransposeKernels"]


class TransposeKernels(Transpose):
    def fp8_transpose(self, input: Any, dtype: Any, *, out: Any) -> Any:
        check_bytes(input, "fp8_transpose")
        if out is None:
            return transpose_bytes(input)
        check_shape(out, transposed_shape(input.shape), "out of fp8_transpose")
        return out.copy_(input.movedim(-1, 0))
