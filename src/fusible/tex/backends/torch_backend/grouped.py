"""Tensors that are many in one: their quantization and their products."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusible.errors import ArgumentError, expected
from fusible.tex.backends.torch_backend.group_quantize import (
    columnwise_fields,
    quantize_group,
    quantize_group_columnwise,
    transposed_fields,
)
from fusible.tex.backends.torch_backend.grouped_gemm import as_one_batch, multiply
from fusible.tex.backends.torch_backend.operands import flat, plain
from fusible.tex.calls.empty_quantized import empty_quantized
from fusible.tex.calls.gemm import GemmShape
from fusible.tex.calls.group_quantize import offsets_of, with_sums
from fusible.tex.calls.grouped import check_quantized_group, layout_of, layout_of_grouped, members
from fusible.tex.calls.grouped_products import Problem, multiply_groups, problems_of, solve
from fusible.tex.formats import BlockFormat, scheme_of
from fusible.tex.formulas.grouped import GroupedFormulas
from fusible.tex.interface.declare import CallArguments, by_name
from fusible.tex.protocol import check_shape, to_torch

__all__ = ["GroupedKernels"]


class GroupedKernels(GroupedFormulas):
    @by_name
    def te_general_grouped_gemm(self, call: CallArguments) -> Any:
        problems, shapes = problems_of(call)
        self._solve(problems, shapes, call.transa, call.transb, call.grad, call.bias_type)
        return call.bias

    def _multiply_groups(self, call: CallArguments) -> None:
        multiply_groups(call, lambda problems, shapes: self._solve(problems, shapes, call.transa, call.transb, False, None))

    def get_grouped_gemm_setup_workspace_size(self, num_tensors: int) -> int:
        return 0

    @by_name
    def group_quantize(self, call: CallArguments) -> Any:
        return quantize_group(flat(plain(call.tensor)), call.quantizer, call, call.noop_flag, call.output)

    @by_name
    def bgrad_group_quantize(self, call: CallArguments) -> Any:
        x = flat(plain(call.tensor))
        return with_sums(x, call, lambda: quantize_group(x, call.quantizer, call))

    @by_name
    def group_requantize_inplace(self, call: CallArguments) -> Any:
        grouped_x, quantizer, num_tensors, first_dims = call.grouped_x, call.quantizer, call.num_tensors, call.first_dims
        tensor_offsets, return_dequantized, otype = call.tensor_offsets, call.return_dequantized, call.otype
        check_quantized_group(grouped_x, "group_requantize_inplace", "use group_quantize")
        layout = layout_of(grouped_x.logical_shape, num_tensors, first_dims, None, tensor_offsets)
        lacking = quantizer.columnwise_usage and grouped_x.columnwise_data is None
        one_scale_each = scheme_of(quantizer).per_tensor
        if one_scale_each and grouped_x.num_tensors != num_tensors:
            got = grouped_x.num_tensors
            raise ArgumentError(expected(f"{num_tensors} members", of="grouped_x, which has a scale for each", got=got, do="pass its num_tensors"))
        values = self._dequantized(grouped_x, to_torch(otype)) if return_dequantized or (lacking and not one_scale_each) else None
        added: dict[str, Tensor] = {}
        if lacking and one_scale_each:
            added = transposed_fields(grouped_x, layout)
        elif lacking and values is not None:
            added = columnwise_fields(grouped_x, values, quantizer, layout)
        for field, buffer in added.items():
            setattr(grouped_x, field, buffer)
        grouped_x.quantizer, grouped_x.num_tensors = quantizer, num_tensors
        grouped_x.first_dims = first_dims
        grouped_x.tensor_offsets = offsets_of(layout, first_dims, None, tensor_offsets, _buffer_of(grouped_x).device)
        grouped_x.offsets = grouped_x.tensor_shapes = grouped_x.quantized_tensors = None
        form = scheme_of(quantizer).format
        if quantizer.optimize_for_gemm and isinstance(form, BlockFormat) and form.swizzles:
            self.grouped_swizzle_for_gemm(grouped_x, True, True)  # type: ignore[attr-defined]
        return values if return_dequantized else None

    @by_name
    def nvfp4_group_quantize_with_amax(self, call: CallArguments) -> Any:
        one = self.nvfp4_quantize_with_amax  # type: ignore[attr-defined]
        for name, amax in (("rowwise_amax", call.rowwise_amax), ("columnwise_amax", call.columnwise_amax)):
            check_shape(amax.view(-1), (call.num_tensors,), f"{name} of nvfp4_group_quantize_with_amax")
        rows, columns = call.rowwise_amax.view(-1), call.columnwise_amax.view(-1)

        def quantize(piece: Tensor, i: int) -> Any:
            return one(piece, call.quantizer, rows[i : i + 1], columns[i : i + 1])

        return quantize_group(flat(plain(call.tensor)), call.quantizer, call, quantize=quantize)

    @by_name
    def group_scaled_swiglu(self, call: CallArguments) -> Any:
        x = flat(plain(call.input_2h))
        values = self._gate_by_rows("swiglu", "group_scaled_swiglu", x, call.prob)  # type: ignore[attr-defined]
        return quantize_group_columnwise(values.to(x.dtype), call)

    @by_name
    def group_scaled_clamped_swiglu(self, call: CallArguments) -> Any:
        options = (call.limit, call.alpha, call.glu_linear_offset)
        if not (all(map(math.isfinite, options)) and call.limit > 0):
            of = "limit, alpha and glu_linear_offset of group_scaled_clamped_swiglu"
            raise ArgumentError(expected("finite numbers and a positive limit", of=of, got=options, do="pass such numbers"))
        x = flat(plain(call.input_2h))
        values = self._gate_by_rows("clamped_swiglu", "group_scaled_clamped_swiglu", x, call.prob, *options)  # type: ignore[attr-defined]
        return quantize_group_columnwise(values.to(x.dtype), call)

    def _group_values(self, x: Any, otype: Any) -> Tensor:
        return self._dequantized(x, to_torch(otype)).view(-1)

    def _group_offsets(self, x: Any) -> Tensor | None:
        return offsets_of(layout_of_grouped(x), x.first_dims, x.last_dims, x.tensor_offsets, _buffer_of(x).device)

    def _solve(self, problems: list[Problem], shapes: list[GemmShape], transa: bool, transb: bool, grad: bool, bias_type: Any) -> None:
        if not as_one_batch(problems, shapes, transa, transb):
            gemm = self.generic_gemm  # type: ignore[attr-defined]
            solve(problems, shapes, transa, transb, grad, bias_type, gemm=gemm, multiply=multiply)

    def _dequantized(self, x: Any, dtype: torch.dtype) -> Tensor:
        """The values of a quantized grouped tensor in its logical shape, 0 where no member lies."""
        layout, found = layout_of_grouped(x), members(x, empty_quantized, bare=True)
        values = torch.zeros(layout.total, dtype=dtype, device=_buffer_of(x).device)
        for place, member in zip(layout.pieces(values), found, strict=True):
            place.copy_(self.dequantize(member, dtype))  # type: ignore[attr-defined]
        return values.view(tuple(x.logical_shape))


def _buffer_of(x: Any) -> Tensor:
    return x.rowwise_data if x.rowwise_data is not None else x.columnwise_data
