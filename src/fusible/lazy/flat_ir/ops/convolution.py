"""Convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible.lazy.dims import is_static
from fusible.lazy.flat_ir.op import FlatIROp
from fusible.lazy.stablehlo.mlir import Mlir

__all__ = ["ConvolutionOp"]


class ConvolutionOp(FlatIROp):
    """``[N, C, *spatial]`` with a kernel ``[O, C / groups, *kernel]`` (stablehlo.convolution).

    ``stride - 1`` windows are skipped between two outputs; ``lhs_dilation - 1`` zeros stand between two elements of the input, and
    ``rhs_dilation - 1`` between two of the kernel; ``padding`` zeros before and after each spatial dimension (fewer than none cuts).
    """

    stride: list[int]
    padding: list[tuple[int, int]]
    lhs_dilation: list[int]
    rhs_dilation: list[int]
    groups: int

    def to_mlir(self, mlir: Mlir, operands: Sequence[Any]) -> Any:
        spatial = list(range(2, len(self.inputs[0].shape)))
        numbers = mlir.hlo.ConvDimensionNumbers.get(0, 1, spatial, 1, 0, spatial, 0, 1, spatial)
        op = mlir.hlo.ConvolutionOp(
            mlir.type(self.outputs[0]),
            *operands,
            dimension_numbers=numbers,
            feature_group_count=mlir.i64(self.groups),
            batch_group_count=mlir.i64(1),
            window_strides=mlir.ints(self.stride),
            padding=mlir.pairs(self.padding),
            lhs_dilation=mlir.ints(self.lhs_dilation),
            rhs_dilation=mlir.ints(self.rhs_dilation),
        )
        return op.results[0]

    def check(self) -> str | None:
        x, weight = (t.shape for t in self.inputs)
        # Channels that only a call knows are compared then.
        paired = x[1] == weight[1] * self.groups or not is_static((x[1], weight[1]))
        fits = paired and self.outputs[0].shape[:2] == (x[0], weight[0])
        return None if fits else "a convolution pairs the channels of its input with those of its kernel"
