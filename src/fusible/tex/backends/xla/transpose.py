"""Transposes of FP8 bytes."""

from __future__ import annotations

from typing import Any

from fusible.errors import DTypeError, expected
from fusible.tex.backends.xla.fp8 import transpose_bytes
from fusible.tex.interface.transpose import Transpose
from fusible.tex.protocol import check_shape, transposed_shape

__all__ = ["TransposeKernels"]


class TransposeKernels(Transpose):
    def fp8_transpose(self, input: Any, dtype: Any, *, out: Any = None) -> Any:
        if input.dtype.itemsize != 1:
            raise DTypeError(expected("uint8 data", of="fp8_transpose", got=input.dtype, do="pass the data of a quantized tensor"))
        if out is None:
            return transpose_bytes(input)
        check_shape(out, transposed_shape(input.shape), "out of fp8_transpose")
        return out.assign_(transpose_bytes(input))
