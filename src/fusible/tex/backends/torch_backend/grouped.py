"""Tensors that are many in one: their quantization and their products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.backends.torch_backend.group_quantize import (
    columnwise_fields,
    offsets_of,
    quantize_group,
    quantize_group_columnwise,
    transposed_fields,
)
from fusible.tex.backends.torch_backend.grouped_gemm import as_one_batch, multiply
from fusible.tex.backends.torch_backend.operands import flat, plain, wide
from fusible.tex.calls.gemm import GemmShape
from fusible.tex.calls.grouped import check_quantized_group, is_grouped, layout_of, layout_of_grouped, members
from fusible.tex.calls.grouped_products import Problem, check_problems, problems_of, solve
from fusible.tex.formats import BlockFormat, scheme_of
from fusible.tex.formulas.grouped import GroupedFormulas
from fusible.tex.interface.declare import CallArguments, by_name
from fusible.tex.protocol import QuantizerLike, accumulator, check_shape, to_torch

__all__ = ["GroupedKernels"]


class GroupedKernels(GroupedFormulas):
    @by_name
    def te_general_grouped_gemm(self, call: CallArguments) -> Any:
        problems, shapes = problems_of(call)
        self._solve(problems, shapes, call.transa, call.transb, call.grad, call.bias_type)
        return call.bias

    def _multiply_groups(self, call: CallArguments) -> None:
        """Any of A, B and D may be a list of tensors instead."""
        D = call.D
        a, b, d = self._members(call.A, "A"), self._members(call.B, "B"), self._members(D, "D")
        if not len(a) == len(b) == len(d):
            got = f"{len(a)}, {len(b)} and {len(d)}"
            raise ArgumentError(expected("equally many members", of="A, B and D of a grouped GEMM", got=got, do="describe the same problems"))
        alphas, betas = _factors(call.alpha, len(a), "alpha"), _factors(call.beta, len(a), "beta")
        problems = [Problem(*three, alpha=first, beta=second) for *three, first, second in zip(a, b, d, alphas, betas, strict=True)]
        shapes = check_problems(problems, call.transa, call.transb, False)
        rows, factors = _biases(call.bias, shapes), _row_factors(call.bias_scale, call.bias, shapes)
        self._solve(problems, shapes, call.transa, call.transb, False, None)
        for place, shape, row, factor in zip(d, shapes, rows, factors, strict=True):
            if row is not None and not shape.empty:
                _add_bias(place, row, factor)

    def get_grouped_gemm_setup_workspace_size(self, num_tensors: int) -> int:
        return 0

    @by_name
    def group_quantize(self, call: CallArguments) -> Any:
        return quantize_group(flat(plain(call.tensor)), call.quantizer, call, call.noop_flag, call.output)

    @by_name
    def bgrad_group_quantize(self, call: CallArguments) -> Any:
        x = flat(plain(call.tensor))
        if call.last_dims is not None:
            raise ArgumentError(expected("no last_dims", of="bgrad_group_quantize", got="some", do="pass members of equal width"))
        layout = layout_of(x.shape, call.num_tensors, call.first_dims, None, call.tensor_offsets)
        sums = [piece.sum(0, dtype=accumulator(x.dtype)) for piece in layout.pieces(x.reshape(-1))]
        grouped = quantize_group(x, call.quantizer, call)
        return [grouped, torch.stack(sums).to(x.dtype)]

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
        grouped_x.tensor_offsets = offsets_of(layout, first_dims, None, tensor_offsets, _held(grouped_x).device)
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
        return offsets_of(layout_of_grouped(x), x.first_dims, x.last_dims, x.tensor_offsets, _held(x).device)

    def _solve(self, problems: list[Problem], shapes: list[GemmShape], transa: bool, transb: bool, grad: bool, bias_type: Any) -> None:
        if not as_one_batch(problems, shapes, transa, transb):
            gemm = self.generic_gemm  # type: ignore[attr-defined]
            solve(problems, shapes, transa, transb, grad, bias_type, gemm=gemm, multiply=multiply)

    def _members(self, x: Any, name: str) -> list[Any]:
        if isinstance(x, (list, tuple)):
            return [*x]
        if not is_grouped(x):
            raise DTypeError(expected("a grouped tensor or a list", of=f"{name} of a grouped GEMM", got=type(x).__qualname__, do="group it"))
        return members(x, self._empty, bare=True)

    def _empty(self, quantizer: QuantizerLike | None, shape: Sequence[int], dtype: Any, device: Any) -> Any:
        return self.create_empty_quantized_tensor(quantizer, list(shape), dtype, device, False)  # type: ignore[attr-defined]

    def _dequantized(self, x: Any, dtype: torch.dtype) -> Tensor:
        """The values of a quantized grouped tensor in its logical shape, 0 where no member lies."""
        layout, found = layout_of_grouped(x), members(x, self._empty, bare=True)
        values = torch.zeros(layout.total, dtype=dtype, device=_held(x).device)
        for place, member in zip(layout.pieces(values), found, strict=True):
            place.copy_(self.dequantize(member, dtype))  # type: ignore[attr-defined]
        return values.view(tuple(x.logical_shape))


def _held(x: Any) -> Tensor:
    return x.rowwise_data if x.rowwise_data is not None else x.columnwise_data


def _factors(values: Any, count: int, name: str) -> list[float]:
    """One number per problem of an fp32 ``[1]`` or ``[count]``."""
    if values.numel() not in (1, count):
        check_shape(values, (count,), f"{name} of a grouped GEMM")
    found = values.reshape(-1).tolist()
    return found * count if len(found) == 1 else found


def _biases(bias: Any, shapes: Sequence[GemmShape]) -> Sequence[Any]:
    """A row for each product, or None for each."""
    if bias is None or not shapes:
        return [None] * len(shapes)
    rows = bias.rowwise_data if is_grouped(bias) else bias
    if rows.numel() % len(shapes):
        raise ShapeError(expected(f"{len(shapes)} rows", of="bias of a grouped GEMM", got=f"{rows.numel()} numbers", do="pass one row per problem"))
    found = rows.reshape(len(shapes), -1).unbind()
    for row, shape in zip(found, shapes, strict=True):
        if len(row) != shape.columns:
            check_shape(row, (shape.columns,), "bias of a grouped GEMM")
    return found


def _row_factors(bias_scale: Any, bias: Any, shapes: Sequence[GemmShape]) -> Sequence[Any]:
    """The entries of ``bias_scale`` for each product's rows, or None for each."""
    if bias_scale is None:
        return [None] * len(shapes)
    if bias is None:
        raise ArgumentError(expected("a bias", of="a grouped GEMM with bias_scale", got="None", do="pass one, or no bias_scale"))
    rows = [shape.rows for shape in shapes]
    if bias_scale.numel() < sum(rows):
        check_shape(bias_scale, (sum(rows),), "bias_scale of a grouped GEMM")
    return bias_scale.reshape(-1)[: sum(rows)].split(rows)


def _add_bias(place: Tensor, row: Tensor, factor: Tensor | None) -> None:
    """``place += factor[:, None] * row``: the product that is rounded already is read, and the sum rounded once more."""
    if factor is None:
        place.add_(row)
    else:
        place.copy_(torch.addcmul(wide(place), factor.view(*place.shape[:-1], 1), wide(row)))
