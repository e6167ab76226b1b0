"""Movements, paddings and allocations of plain tensors, and the offsets of tensors in a common buffer."""

# A declaration is documentation alone.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.tex.interface.arguments import Device, DTypeLike, Shape, Tensor
from fusible.tex.interface.declare import function
from fusible.tex.interface.domains import Count, Size

__all__ = ["Layout"]


class Layout:
    """Tensors are of any dtype; what is wrong raises before anything is written."""

    @function("input", input="any [r n]", output="=input [s n]", input_row_list="k * any", padded_input_row_list="k * any", disjoint="output")
    def fused_multi_row_padding(self, input: Tensor, output: Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]) -> None:
        """Copies the ``input_row_list[i]`` rows of segment ``i`` of ``input [sum, n]`` to the first of its ``padded_input_row_list[i]`` rows in
        ``output [padded sum, n]``, and zeroes the others. A segment without rows is skipped: its rows of ``output`` stay as they are.

        Raises ``ShapeError`` where rows do not add up or a segment shrinks, ``DTypeError`` where the dtypes differ.
        """

    @function("input", input="any [r n]", output="=input [s n]", input_row_list="k * any", unpadded_input_row_list="k * any", disjoint="output")
    def fused_multi_row_unpadding(self, input: Tensor, output: Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]) -> None:
        """The inverse: copies the first ``unpadded_input_row_list[i]`` of the ``input_row_list[i]`` rows of each segment to ``output``, one segment
        after the other."""

    @function(shapes="k * any", dtypes="k * any", alignments="k * any")
    def bulk_allocate(
        self, shapes: Sequence[Shape], dtypes: Sequence[DTypeLike], device: Device | None = None, alignments: Sequence[int] | None = None
    ) -> list[Any]:
        """Tensors of unspecified values, of these shapes and dtypes, out of one allocation on ``device`` (None: torch's default device).

        The address of each is a multiple of its alignment in bytes (None: 16 for all), which is a power of two no smaller than an element. Raises
        ``ArgumentError`` for another alignment and for lists of unequal length.
        """

    @function("tensors")
    def copy_data_ptrs_to_device(self, tensors: Sequence[Tensor], device: Device) -> Any:
        """The address of each tensor's data, int64 ``[n]`` on ``device``."""

    @function("first_dims", first_dims="integer [n]")
    def splits_to_offsets(self, first_dims: Tensor, logical_last_dim: Size) -> Any:
        """``[0, cumsum(first_dims * logical_last_dim)]``, int64 ``[n + 1]`` on the device of ``first_dims`` (integers ``[n]``).

        Element offsets of matrices of that width one after the other. Raises ``ShapeError`` unless there is one dimension.
        """

    @function("split_sizes", split_sizes="integer [n]", strides="k * any", include_leading_zero="k * any", dtypes="k * any")
    def splits_to_offsets_multi(
        self,
        split_sizes: Tensor,
        device: Device,
        *,
        strides: Sequence[int],
        include_leading_zero: Sequence[bool],
        dtypes: Sequence[DTypeLike],
        bulk_allocate: bool = False,
    ) -> tuple[Any, list[Any]]:
        """``(split_sizes, offsets)``: the sizes as int64 on ``device``, and for each stride ``cumsum(split_sizes) * stride`` in its dtype, with a 0
        before it where ``include_leading_zero``.

        With ``bulk_allocate`` the offsets come out of one allocation. Raises ``ShapeError`` unless the sizes have one dimension, ``ArgumentError``
        for lists of unequal length.
        """

    @function("inputs", inputs="k * any [a b c d]", alone="outputs")
    def multi_tensor_transpose_to_bhsd(
        self,
        inputs: Sequence[Tensor | None],
        original_format: str,
        outputs: Sequence[Tensor | None] = [],  # the signature's own
    ) -> list[Any | None]:
        """Each 4-D tensor in ``"sbhd"`` or ``"bshd"`` as contiguous ``[b, h, s, d]``; None stays None.

        An output given is written and returned; it may be wider in its last dimension, where it is filled with zeros. Raises ``ShapeError`` for an
        output that does not fit, ``DTypeError`` for one of another dtype, ``ArgumentError`` for another format or number of outputs.
        """

    @function("inputs", inputs="k * any [* n]")
    def multi_tensor_pad_last_dim(self, inputs: Sequence[Tensor], alignment: Count) -> list[Any]:
        """Each tensor with zeros up to a last dimension that is a multiple of ``alignment``; one that has such a dimension is returned itself.

        Raises ``ArgumentError`` for an alignment below 1.
        """
