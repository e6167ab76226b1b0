"""Quantizing and dequantizing."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.tex.interface.arguments import Device, DTypeLike, QuantizedTensor, Quantizer, Shape, Tensor
from fusible.tex.interface.declare import function
from fusible.tex.interface.domains import FloatingDType

__all__ = ["Quantize"]


class Quantize:
    """Casts between high precision and 8 or 4 bits. Every cast rounds to nearest even and saturates (infinities included); NaN stays NaN.

    A quantizer says how, by its attributes. Per-tensor FP8: *delayed* scaling uses its ``scale`` and raises its ``amax`` to ``max(amax, max |x|)``
    (where ``amax`` is None, it is set to ``max |x|``, fp32 ``[1]``); *current* scaling derives the scale from the tensor's own amax. A non-finite
    element makes the amax non-finite. ``rowwise_usage`` asks for the data, ``columnwise_usage`` for the transposed data ``[last, *leading]``.

    Block-scaled formats have a scale per block of the matrix ``[M, K]`` (``K`` last, ``M`` the product of the leading dimensions). The row-wise copy
    has blocks along rows, the column-wise one along columns, each from the tensor itself; with two-dimensional scaling both have the scales of square
    tiles. ``a`` is the block's amax, of which NaN makes the scale NaN (FP8 blocks: 1):

    * FP8 blocks of 128: ``q = cast(x * s)``, ``s = fp8_max / max(a, amax_epsilon)``, by default rounded down to a power of two; 1 where ``a`` is 0 or
      not finite, and the largest value of ``x``'s dtype where ``s`` overflows. Stored is ``1 / s``, fp32. Any shape.
    * MXFP8, blocks of 32: ``q = cast(x * 2^-e)`` with the least ``2^e >= a / fp8_max``; stored is the byte ``e + 127`` (E8M0). ``M`` and ``K`` in
      multiples of 32; column-wise data is not transposed.
    * NVFP4, blocks of 16: with ``S = 6 * 448 / amax`` of the tensor (of each line with ``row_scaled_nvfp4``), ``d = e4m3(a * S / 6)`` and
      ``q = e2m1(x * S / d)``, two to a byte; stored is ``d``. ``M`` and ``K`` in multiples of 16. Options: a random Hadamard transform of the
      column-wise copy (bfloat16 only), stochastic rounding by torch's generator, 4-over-6 (``d`` or ``1.5 d``, whichever errs less), and the maximum
      of the amax over a process group.

    With ``optimize_for_gemm`` the scales of MXFP8 and NVFP4 lie in the order that tensor cores read.
    """

    @function("tensor quantizer", tensor="float [*]", noop="fp32 (1)")
    def quantize(self, tensor: Tensor, quantizer: Quantizer, output: QuantizedTensor | None = None, noop: Tensor | None = None) -> Any:
        """``cast(tensor * scale)`` with ``scale_inv = 1 / scale`` beside it, of the quantizer's class.

        ``tensor`` is ``[*leading, last]``. With ``output``, that tensor's buffers are written and it is returned; where ``noop[0] == 1``, nothing is
        written (neither ``output`` nor the quantizer's amax). Raises ``ShapeError`` where ``output`` has another shape or ``tensor`` does not consist
        of whole blocks, ``ArgumentError`` for options that exclude each other. Source: Micikevicius et al. 2022, arXiv:2209.05433.
        """

    @function("input")
    def dequantize(self, input: QuantizedTensor, otype: FloatingDType) -> Any:
        """``data * scale_inv`` in fp32, rounded once to ``otype``; ``[*leading, last]`` as the quantized tensor.

        NVFP4 is ``data * (amax / (6 * 448)) * scale_inv``. The row-wise copy is read where there is one; of a column-wise one the Hadamard transform
        is taken back.
        """

    @function("input quantizer", input="real [* n]")
    def bgrad_quantize(self, input: Tensor, quantizer: Quantizer | None) -> list[Any]:
        """``[grad_bias, quantized]`` of ``input [*leading, last]``: the sum over rows ``[last]`` in ``input``'s dtype, and ``quantize(input)``.

        With ``quantizer`` None the second is ``input`` itself.
        """

    @function("quantizer")
    def create_empty_quantized_tensor(self, quantizer: Quantizer | None, shape: Shape, dtype: DTypeLike, device: Device, pin_memory: bool) -> Any:
        """A quantized tensor of unspecified values with the buffers that ``quantizer``'s usages ask for; ``dtype`` is the nominal one.

        With ``quantizer`` None, a plain tensor of ``dtype``.
        """

    @function("tensor_list quantizer_list", tensor_list="k * any", quantizer_list="k * any")
    def multi_tensor_quantize(self, tensor_list: Sequence[Tensor], quantizer_list: Sequence[Quantizer | None]) -> list[Any]:
        """``quantize`` of each tensor by the quantizer at its place; the tensor itself where that is None.

        Raises ``ArgumentError`` for unequal counts.
        """

    @function("tensor quantizer_list", tensor="float [r *]", split_sections="k * any", quantizer_list="k * any", idle="disable_bulk_allocation")
    def split_quantize(
        self, tensor: Tensor, split_sections: Shape, quantizer_list: Sequence[Quantizer | None], disable_bulk_allocation: bool = False
    ) -> list[Any]:
        """``multi_tensor_quantize`` of consecutive parts of ``tensor``, with ``split_sections`` rows of its first dimension each.

        Rows beyond the last part are left out. ``disable_bulk_allocation`` changes no value. Raises ``ShapeError`` where they exceed the rows.
        """

    @function("tensor quantizer", tensor="float [* n]", rowwise_amax="fp32", columnwise_amax="fp32")
    def nvfp4_quantize_with_amax(self, tensor: Tensor, quantizer: Quantizer, rowwise_amax: Tensor | None, columnwise_amax: Tensor | None) -> Any:
        """``quantize`` by an NVFP4 quantizer with known amaxes, fp32 ``[1]`` (``[M]`` and ``[K]`` with ``row_scaled_nvfp4``), of each copy.

        ``columnwise_amax`` is that of the transform, where there is one. No amax is computed or reduced over a group; that of a copy which the
        quantizer does not ask for is not read. Raises ``DTypeError`` for another quantizer, ``ShapeError`` for another shape or type of an amax.
        """
