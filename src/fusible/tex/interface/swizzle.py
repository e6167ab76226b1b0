"""The order of block scales that matrix products of NVIDIA read."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.tex.interface.arguments import Device, GroupedTensor, Tensor
from fusible.tex.interface.declare import function

__all__ = ["Swizzle"]


class Swizzle:
    """A scale matrix of ``R`` rows and ``C`` blocks per row (``R % 128 == 0``, ``C % 4 == 0``) is permuted as ``view(R / 128, 4, 32, C / 4, 4)
    .permute(0, 3, 2, 1, 4)``, its shape staying. MXFP8's column-wise scales ``[C, R]`` are permuted as their transpose is; NVFP4's are transposed
    already. What pads a matrix becomes 0, but of ``_unchecked_``.

    The functions on quantized tensors replace an attribute by a new tensor: who shares the former keeps it in plain order. What is no MXFP8 or NVFP4
    tensor is left alone. Source: NVIDIA's cuBLAS documentation, "1D block scaling factors layout".
    """

    @function("tensor")
    def swizzle_scales_for_gemm_(self, tensor: Tensor) -> None:
        """Swizzles ``_rowwise_scale_inv`` and ``_columnwise_scale_inv``, whichever there are, and sets ``_with_gemm_swizzled_scales``.

        A tensor with that flag is left alone. Raises ``ShapeError`` where scales do not fit the data.
        """

    @function("tensors")
    def multi_tensor_swizzle_scales_for_gemm_(self, tensors: Sequence[Tensor], rowwise_usage: bool, columnwise_usage: bool) -> None:
        """``swizzle_scales_for_gemm_`` of the asked scales of each tensor that has them.

        Scales not asked for stay in plain order, which the flag no longer tells: leave a usage out only where these scales are not read.
        """

    @function("tensors")
    def multi_tensor_swizzle_scales_for_gemm_unchecked_(self, tensors: Sequence[Tensor], rowwise_usage: bool, columnwise_usage: bool) -> None:
        """The same, of scales that are not shaped after the data; ``_with_gemm_swizzled_scales`` is neither read nor set, the caller sets it.

        Each scale matrix is taken as ``[-1, last]``, and must have whole tiles.
        """

    @function("tensor")
    def grouped_swizzle_for_gemm(self, tensor: GroupedTensor, rowwise: bool, columnwise: bool) -> None:
        """Swizzles the asked scales of each member of a grouped MXFP8 or NVFP4 tensor: ``scale_inv`` and ``columnwise_scale_inv``, where the members'
        matrices lie one after the other. Sets ``_with_gemm_swizzled_scales``; a tensor with that flag is left alone.

        Scales not asked for stay in plain order, as above. Raises ``ShapeError`` where the members need more scales than there are.
        """

    @function("data_tensors scale_tensors", data_tensors="k * any [_ *]", scale_tensors="k * any")
    def swizzle_scales_and_pack_ptrs_for_discrete_weights(
        self, data_tensors: Sequence[Tensor], scale_tensors: Sequence[Tensor], swizzle_type: str, device: Device
    ) -> tuple[Any, Any, Any]:
        """``(data pointers, scale pointers, swizzled scales)``: int64 ``[n]`` addresses on ``device``, and the uint8 buffer that the second lie in.

        ``swizzle_type`` is ``"mxfp8_rowwise"``, ``"mxfp8_columnwise"`` or ``"nvfp4"`` (either usage); the scales stay as they are, and are those of
        the data's blocks, padded. Raises ``ArgumentError`` for another type or unequally many tensors, ``ShapeError`` for scales of other data.
        """
