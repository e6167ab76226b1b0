"""Grouped GEMM, for backends of torch's tensors: the products of many pairs of matrices, checked all, then computed each straight into its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.tex.calls.empty_quantized import empty_quantized
from fusible.tex.calls.gemm import GemmShape, GemmTypes, gemm_shape
from fusible.tex.calls.grouped import check_list_lengths, is_grouped, members
from fusible.tex.formats import is_quantized, logical_shape, nominal
from fusible.tex.interface.arguments import DTypeLike
from fusible.tex.interface.declare import CallArguments
from fusible.tex.protocol import accumulator, check_same_device, check_shape, to_torch

__all__ = ["Problem", "bare_key", "multiply_groups", "problems_of", "solve"]

_FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_TYPES = GemmTypes(_FLOATING, nominal, to_torch)
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Problem:
    """One product and what is done with it. ``bias`` is added, or with ``grad`` receives."""

    A: Any
    B: Any
    D: Any
    bias: Tensor | None = None
    pre_gelu: Tensor | None = None
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def bare(self) -> bool:
        """Whether it is one matrix product of plain matrices, with at most a bias: one call of a kernel that rounds once."""
        A, B, D = self.A, self.B, self.D
        return (
            type(A) in _PLAIN
            and type(B) in _PLAIN
            and self.pre_gelu is None
            and self.alpha == 1.0
            and self.beta == 0.0
            and A.dtype is B.dtype is D.dtype
            and A.dim() == B.dim() == D.dim() == 2
            and D.is_contiguous()
            and (self.bias is None or self.bias.dtype is D.dtype)
        )


def _shape(problem: Problem, transa: bool, transb: bool) -> GemmShape:
    accumulates = problem.beta != 0.0
    job = _TYPES.check(problem.A, transa, problem.B, transb, problem.D, None, None, accumulates, problem.alpha, problem.beta or None)
    return job.shape


def _plain_shape(problem: Problem, transa: bool, transb: bool) -> GemmShape:
    """The same of plain matrices on the host alone, whose checks are few."""
    A, B, D = problem.A, problem.B, problem.D
    shape = gemm_shape(A.shape, transa, B.shape, transb)
    return shape if shape.output == D.shape and A.dtype in _FLOATING else _shape(problem, transa, transb)


def check_problems(problems: Sequence[Problem], transa: bool, transb: bool, grad: bool) -> list[GemmShape]:
    """The shapes of all products. Raises for any that does not fit, so that nothing is computed."""
    shapes: list[GemmShape] = []
    known: dict[Any, GemmShape] = {}
    for problem in problems:
        key = bare_key(problem)
        if key is not None:
            if key not in known:
                known[key] = _plain_shape(problem, transa, transb)
            shapes.append(known[key])
            continue
        shape = _shape(problem, transa, transb)
        if type(problem.B) in _PLAIN:
            check_same_device(problem.D, problem.B, "D of a grouped GEMM")
            if type(problem.A) in _PLAIN:
                check_same_device(problem.A, problem.B, "A of a grouped GEMM")
        if is_quantized(problem.D):
            raise DTypeError(expected("an unquantized D", of="a grouped GEMM", got=type(problem.D).__qualname__, do="quantize the result"))
        bias_length = logical_shape(problem.B)[-1] if grad and problem.pre_gelu is None else shape.columns
        for name, tensor, size in (("bias", problem.bias, (bias_length,)), ("pre_gelu_out", problem.pre_gelu, shape.output)):
            if tensor is not None and tensor.numel() != math.prod(size):
                check_shape(tensor, size, f"{name} of a grouped GEMM")
        shapes.append(shape)
    return shapes


def bare_key(problem: Problem) -> Any:
    """What the checks of a bare product on the host look at, where experts are alike in all of it; None where there is more to look at."""
    A, B, D = problem.A, problem.B, problem.D
    if problem.bias is not None or not problem.bare or not (A.is_cpu and B.is_cpu and D.is_cpu):
        return None
    return A.shape, B.shape, D.shape, A.dtype


def _outputs(A: list[Any], transa: bool, B: list[Any], transb: bool, D: list[Any] | None, D_type: DTypeLike, single: bool) -> list[Any]:
    """Where each product goes."""
    dtype = to_torch(D_type)
    if D is None:
        if single:
            raise ArgumentError(expected("a given D", of="te_general_grouped_gemm with a single output", got="None", do="pass a list of one tensor"))
        return _new_outputs(A, transa, B, transb, dtype)
    wrong = [out.dtype for out in D if out.dtype is not dtype]
    if wrong:
        raise DTypeError(expected(f"{dtype}, the D_type", of="D of te_general_grouped_gemm", got=wrong[0], do="pass the dtype of D"))
    if not single:
        return D
    if len(D) != 1:
        raise ArgumentError(expected("one tensor", of="D of te_general_grouped_gemm with a single output", got=len(D), do="pass a list of one"))
    return _output_blocks(A, transa, B, transb, D[0])


def _new_outputs(A: Sequence[Any], transa: bool, B: Sequence[Any], transb: bool, dtype: torch.dtype) -> list[Tensor]:
    """A tensor for each product."""
    shapes = [_TYPES.check(a, transa, b, transb, None, None, dtype, False, 1.0, None).shape.output for a, b in zip(A, B, strict=False)]
    return [torch.empty(shape, dtype=dtype, device=b.device) for shape, b in zip(shapes, B, strict=False)]


def _output_blocks(A: Sequence[Any], transa: bool, B: Sequence[Any], transb: bool, out: Tensor) -> list[Tensor]:
    """The consecutive blocks of rows of ``out`` that the products fill."""
    if not out.is_contiguous():
        raise ArgumentError(expected("a contiguous tensor", of="the single D of a grouped GEMM", got=f"strides {out.stride()}", do="pass it whole"))
    rows = [logical_shape(b)[-1] if transb else math.prod(logical_shape(b)[:-1]) for b in B]
    matrix = out.view(math.prod(out.shape[:-1]), out.shape[-1])
    if sum(rows) > len(matrix):
        got = f"{len(matrix)} for blocks of {rows}"
        raise ShapeError(expected(f"{sum(rows)} rows", of="the single D of a grouped GEMM", got=got, do="pass a tensor that holds all results"))
    return [*matrix[: sum(rows)].split(rows)]


def problems_of(call: CallArguments) -> tuple[list[Problem], list[GemmShape]]:
    """The problems of a call of ``te_general_grouped_gemm`` and their shapes, checked all."""
    outputs = _outputs(call.A, call.transa, call.B, call.transb, call.D, call.D_type, call.single_output)
    check_list_lengths(call, len(outputs))
    for name in ("bias", "pre_gelu_out"):
        for x, out in zip(getattr(call, name), outputs, strict=True):
            if x.numel():
                check_same_device(x, out, f"{name} of te_general_grouped_gemm")
    beta = 1.0 if call.accumulate else 0.0
    problems = [
        Problem(a, b, d, x if x.numel() else None, gelu if gelu.numel() else None, beta=beta)
        for a, b, d, x, gelu in zip(call.A, call.B, outputs, call.bias, call.pre_gelu_out, strict=True)
    ]
    return problems, check_problems(problems, call.transa, call.transb, call.grad)


def solve(
    problems: Sequence[Problem],
    shapes: Sequence[GemmShape],
    transa: bool,
    transb: bool,
    grad: bool,
    bias_type: DTypeLike | None,
    *,
    gemm: Callable[..., list[Any]],
    multiply: Callable[[Problem, bool, bool], Any],
) -> None:
    """Compute all problems in place. ``gemm`` is the backend's ``generic_gemm``, ``multiply`` its way with those that are ``bare``."""
    for problem, shape in zip(problems, shapes, strict=True):
        if shape.empty:
            _clear(problem, grad)
        elif problem.bare and not (grad and problem.bias is not None):
            multiply(problem, transa, transb)
        else:
            _generic(gemm, problem, transa, transb, grad, bias_type)


def _clear(problem: Problem, grad: bool) -> None:
    if problem.beta == 0.0:
        problem.D.zero_()
    elif problem.beta != 1.0:
        problem.D.mul_(problem.beta)
    if grad and problem.bias is not None:
        problem.bias.zero_()
    if problem.pre_gelu is not None and not grad:
        problem.pre_gelu.zero_()


def _generic(gemm: Callable[..., list[Any]], problem: Problem, transa: bool, transb: bool, grad: bool, bias_type: DTypeLike | None) -> None:
    gelu, bias = problem.pre_gelu is not None, problem.bias
    gelu_in = problem.pre_gelu.view(problem.D.shape) if problem.pre_gelu is not None and grad else None
    operands = (problem.A, transa, problem.B, transb, problem.D, None, None)
    epilogue = (bias.view(-1) if bias is not None else None, bias_type, gelu, gelu_in, grad, None, 0)
    accumulates = problem.beta != 0.0
    _, bias_grad, pre_gelu, _ = gemm(*operands, *epilogue, accumulates, True, alpha=problem.alpha, beta=problem.beta if accumulates else None)
    if bias_grad is not None and bias is not None:
        bias.copy_(bias_grad.view(bias.shape))
    if pre_gelu is not None and problem.pre_gelu is not None:
        problem.pre_gelu.copy_(pre_gelu.view(problem.pre_gelu.shape))


def multiply_groups(call: CallArguments, compute: Callable[[list[Problem], list[GemmShape]], None]) -> None:
    """Write to D the products of a call of ``te_general_grouped_gemm_for_grouped_tensor``, by ``compute(problems, shapes)``. Any of A, B and D may be
    a list of tensors instead."""
    a, b, d = (_members(x, name) for name, x in (("A", call.A), ("B", call.B), ("D", call.D)))
    if not len(a) == len(b) == len(d):
        got = f"{len(a)}, {len(b)} and {len(d)}"
        raise ArgumentError(expected("equally many members", of="A, B and D of a grouped GEMM", got=got, do="describe the same problems"))
    alphas, betas = _factors(call.alpha, len(a), "alpha"), _factors(call.beta, len(a), "beta")
    problems = [Problem(*three, alpha=first, beta=second) for *three, first, second in zip(a, b, d, alphas, betas, strict=True)]
    shapes = check_problems(problems, call.transa, call.transb, False)
    rows, factors = _biases(call.bias, shapes), _row_factors(call.bias_scale, call.bias, shapes)
    compute(problems, shapes)
    for place, shape, row, factor in zip(d, shapes, rows, factors, strict=True):
        if row is not None and not shape.empty:
            _add_bias(place, row, factor)


def _members(x: Any, name: str) -> list[Any]:
    if isinstance(x, (list, tuple)):
        return [*x]
    if not is_grouped(x):
        raise DTypeError(expected("a grouped tensor or a list", of=f"{name} of a grouped GEMM", got=type(x).__qualname__, do="group it"))
    return members(x, empty_quantized, bare=True)


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


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulator(x.dtype))


def _add_bias(place: Tensor, row: Tensor, factor: Tensor | None) -> None:
    """``place += factor[:, None] * row``: the product that is rounded already is read, and the sum rounded once more."""
    if factor is None:
        place.add_(row)
    else:
        place.copy_(torch.addcmul(_wide(place), factor.view(*place.shape[:-1], 1), _wide(row)))
