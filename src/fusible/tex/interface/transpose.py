"""Transposing quantized data."""

from __future__ import annotations

from typing import Any

from fusible.tex.interface.declare import function

__all__ = ["Transpose"]


class Transpose:
    """Movements of data that change no value."""

    @function("input")
    def fp8_transpose(self, input: Any, dtype: Any, *, out: Any) -> Any:
        """``[*leading, last] -> [last, *leading]`` of uint8 FP8 data, contiguous; ``out``, unless None, is written and returned.

        ``dtype`` names the FP8 format of the bytes, which does not change the result. Raises ``ShapeError`` where ``out`` has another shape.
        """
