"""Tensors that are many in one."""

from __future__ import annotations

from typing import Any

from fusible.errors import DTypeError, expected
from fusible.tex.calls.grouped import build_grouped, check_quantized_group
from fusible.tex.interface.arguments import DTypeLike, GroupedTensor
from fusible.tex.interface.declare import CallArguments, by_name
from fusible.tex.interface.grouped import Grouped
from fusible.tex.protocol import to_torch

__all__ = ["GroupedFormulas"]


class GroupedFormulas(Grouped):
    def _group_values(self, x: GroupedTensor, otype: DTypeLike) -> Any:
        """The values of a quantized grouped tensor in the order of its buffer, and 0 where no member lies."""
        raise NotImplementedError

    def _group_offsets(self, x: GroupedTensor) -> Any:
        """Where the members of ``x`` begin, or None."""
        return x.tensor_offsets

    def group_dequantize(self, input: GroupedTensor, otype: DTypeLike) -> Any:
        check_quantized_group(input, "group_dequantize", "quantize it by group_quantize")
        return build_grouped(
            input.quantizer,
            shape=tuple(input.logical_shape),
            dtype=to_torch(otype),
            num_tensors=input.num_tensors,
            quantizer=None,
            data=self._group_values(input, otype),
            first_dims=input.first_dims,
            last_dims=input.last_dims,
            tensor_offsets=self._group_offsets(input),
        )

    def _multiply_groups(self, call: CallArguments) -> None:
        """Write to D, which is not quantized, the products of a call of ``te_general_grouped_gemm_for_grouped_tensor``."""
        raise NotImplementedError

    @by_name
    def te_general_grouped_gemm_for_grouped_tensor(self, call: CallArguments) -> Any:
        if getattr(call.D, "quantizer", None) is not None:
            raise DTypeError(expected("an unquantized D", of="a grouped GEMM", got="a quantized one", do="quantize the result by group_quantize"))
        self._multiply_groups(call)
        return call.D

    te_general_grouped_gemm_for_discrete_in = te_general_grouped_gemm_for_grouped_tensor
    te_general_grouped_gemm_for_discrete_out = te_general_grouped_gemm_for_grouped_tensor
