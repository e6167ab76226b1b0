"""The products of lists of lazy matrices, each of a shape that is known: one product after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fusible import lazy
from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.lazy import Tensor
from fusible.tex.backends.xla.dtypes import to_lazy
from fusible.tex.backends.xla.operands import flat
from fusible.tex.calls.gemm import gemm_shape
from fusible.tex.calls.grouped import check_list_lengths
from fusible.tex.formats import logical_shape
from fusible.tex.interface.declare import CallArguments
from fusible.tex.protocol import check_shape

__all__ = ["listed_products"]


def listed_products(gemm: Callable[..., list[Any]], call: CallArguments) -> list[Any]:
    """``te_general_grouped_gemm``; ``gemm`` is the backend's ``generic_gemm``. Results are assigned once all products are recorded."""
    shapes = [gemm_shape(logical_shape(a), call.transa, logical_shape(b), call.transb) for a, b in zip(call.A, call.B, strict=False)]
    former = _former(call, [shape.output for shape in shapes])
    check_list_lengths(call, len(call.A) if former is None else len(former))
    new: list[tuple[Tensor, Tensor]] = []
    outputs = []
    for i, (a, b, bias, pre_gelu, shape) in enumerate(zip(call.A, call.B, call.bias, call.pre_gelu_out, shapes, strict=True)):
        bias, pre_gelu = (x if x.size else None for x in (bias, pre_gelu))
        before = None if former is None else Tensor.from_trace_tensor(former[i].trace_tensor)
        own = gemm(
            a, call.transa, b, call.transb, before, None, call.D_type, None if bias is None else _row(bias, b, call, shape.columns), call.bias_type,
            pre_gelu is not None, None if pre_gelu is None or not call.grad else pre_gelu, call.grad, None, 0, call.accumulate, True,
        )  # fmt: skip
        result, bias_grad, sums, _ = own
        outputs.append(result)
        if call.grad and bias is not None:
            new.append((bias, lazy.zeros(bias.shape, bias.dtype) if shape.empty else bias_grad))
        if not call.grad and pre_gelu is not None:
            check_shape(pre_gelu, shape.output, "pre_gelu_out of te_general_grouped_gemm")
            new.append((pre_gelu, lazy.zeros(pre_gelu.shape, pre_gelu.dtype) if shape.empty else sums))
    if former is not None and call.single_output:
        rows = [flat(x) for x in outputs]
        whole = flat(call.D[0])
        rest = whole[sum(x.shape[0] for x in rows) :]
        new.append((call.D[0], lazy.concatenate([*rows, rest], 0)))
    elif former is not None:
        new += zip(call.D, outputs, strict=True)
    for place, value in new:
        place.assign_(lazy.reshape(lazy.cast(value, place.dtype), place.shape))
    return call.bias


def _row(bias: Tensor, b: Any, call: CallArguments, columns: int) -> Tensor:
    """A bias that is added, or where its gradient goes, as one row."""
    length = logical_shape(b)[-1] if call.grad else columns
    if bias.size != length:
        check_shape(bias, (length,), "bias of te_general_grouped_gemm")
    return lazy.reshape(bias, (length,))


def _former(call: CallArguments, shapes: list[tuple[int, ...]]) -> list[Tensor] | None:
    """The former values of D for each product; None without a D."""
    if call.D is None:
        if call.single_output:
            raise ArgumentError(expected("a given D", of="te_general_grouped_gemm with a single output", got="None", do="pass a list of one tensor"))
        return None
    dtype = to_lazy(call.D_type)
    wrong = [out.dtype for out in call.D if out.dtype is not dtype]
    if wrong:
        raise DTypeError(expected(f"{dtype}, the D_type", of="D of te_general_grouped_gemm", got=wrong[0], do="pass the dtype of D"))
    if not call.single_output:
        return [*call.D]
    if len(call.D) != 1:
        got = len(call.D)
        raise ArgumentError(expected("one tensor", of="D of te_general_grouped_gemm with a single output", got=got, do="pass a list of one"))
    matrix, rows = flat(call.D[0]), [math.prod(shape[:-1]) for shape in shapes]
    if sum(rows) > matrix.shape[0]:
        got = f"{matrix.shape[0]} for blocks of {rows}"
        raise ShapeError(expected(f"{sum(rows)} rows", of="the single D of a grouped GEMM", got=got, do="pass a tensor that holds all results"))
    ends = [sum(rows[: i + 1]) for i in range(len(rows))]
    return [lazy.reshape(matrix[end - count : end], shape) for end, count, shape in zip(ends, rows, shapes, strict=True)]
