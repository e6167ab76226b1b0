"""Quantizing and dequantizing."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.tex.interface.declare import function

__all__ = ["Quantize"]


class Quantize:
    """Casts between high precision and FP8. Every cast rounds to nearest even and saturates (infinities included); NaN stays NaN.

    A quantizer says how: *delayed* scaling uses its ``scale`` and raises its ``amax`` to ``max(amax, max |x|)`` (where ``amax`` is None, it is set
    to ``max |x|``, fp32 ``[1]``); *current* scaling derives the scale from the tensor's own amax. A non-finite element makes the amax non-finite.
    ``rowwise_usage`` asks for the data, ``columnwise_usage`` for the transposed data ``[last, *leading]``.
    """

    @function("tensor", "quantizer")
    def quantize(self, tensor: Any, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
        """``cast(tensor * scale)`` with ``scale_inv = 1 / scale`` beside it, of the quantizer's class.

        ``tensor`` is ``[*leading, last]``. With ``output``, that tensor's buffers are written and it is returned; where ``noop[0] == 1``, nothing is
        written (neither ``output`` nor the quantizer's amax). Raises ``ShapeError`` where ``output`` has another shape. Source: Micikevicius et al.
        2022, arXiv:2209.05433.
        """

    @function("input")
    def dequantize(self, input: Any, otype: Any) -> Any:
        """``data * scale_inv`` in fp32, rounded once to ``otype``; ``[*leading, last]`` as the quantized tensor."""

    @function("input", "quantizer")
    def bgrad_quantize(self, input: Any, quantizer: Any) -> list[Any]:
        """``[grad_bias, quantized]`` of ``input [*leading, last]``: the sum over rows ``[last]`` in ``input``'s dtype, and ``quantize(input)``.

        With ``quantizer`` None the second is ``input`` itself.
        """

    @function("quantizer")
    def create_empty_quantized_tensor(self, quantizer: Any, shape: Sequence[int], dtype: Any, device: Any, pin_memory: bool) -> Any:
        """A quantized tensor of unspecified values with the buffers that ``quantizer``'s usages ask for; ``dtype`` is the nominal one."""
