"""Groups by the compiled kernels: each expert's product reads its weight once, as it lies in memory, and members are cast one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusible import cpp_extensions as native
from fusible.tex.backends.cpu.blocks import FORMATS, quantize_blocks, takes
from fusible.tex.backends.cpu.gemm import products_gain
from fusible.tex.backends.cpu.operands import member_kinds, unquantized
from fusible.tex.calls.gemm import GemmShape
from fusible.tex.calls.group_quantize import grouped_tensor, like, with_sums
from fusible.tex.calls.grouped_products import Problem, multiply_groups, problems_of, solve
from fusible.tex.calls.memory_checks import check_outputs_disjoint, surely_disjoint, writing_without_overlap
from fusible.tex.formats import format_named
from fusible.tex.formulas.grouped import GroupedFormulas
from fusible.tex.interface.declare import DECLARATIONS, CallArguments, Request, by_name, inherited, requires
from fusible.tex.interface.grouped import Grouped
from fusible.tex.selection.dispatch import hand_over

__all__ = ["GROUPED_PRODUCTS", "GroupedKernels"]

GROUPED_PRODUCTS = tuple(f"te_general_grouped_gemm_for_{kind}" for kind in ("grouped_tensor", "discrete_in", "discrete_out"))


def _better_here(request: Request) -> str | None:
    A, B = request["A"], request["B"]
    if not (isinstance(A, tuple) and isinstance(B, tuple)):
        return "reads lists of operands"
    if request["transb"] and A == B and request["D"] in (A, None):
        return "leaves weight gradients as wide as their operands to torch's own, which writes them in less time"
    is_plain = not request["transb"] and set(D if isinstance(D := request["D"], tuple) else (D,)) <= {None, *A}
    reasons = [reason for a in A for b in B if (reason := products_gain(a, b, is_plain)) is not None]
    return reasons[0] if reasons else None


def _quantized_groups(request: Request) -> str | None:
    if not any(len(kind) == 3 for name in ("A", "B") for kind in member_kinds(request[name])):
        return "serves groups of which A or B is quantized; others are left to torch's own"
    if any(kind[-1] is torch.float64 for kind in member_kinds(request["D"])):
        return "writes float32, bfloat16 and float16"
    return None


def _of_groups(name: str) -> Callable[..., Any]:
    """The method of one of ``GROUPED_PRODUCTS``."""
    method = writing_without_overlap(inherited(getattr(GroupedFormulas, name)), DECLARATIONS[name])
    return requires(_quantized_groups)(method)


def _into_blocks(request: Request) -> str | None:
    quantizer = request["quantizer"]
    if not isinstance(quantizer, tuple) or format_named(quantizer[0]) not in FORMATS:
        return "quantizes groups to formats in blocks; others are left to torch's own"
    return None


def _quantized(x: Tensor, call: CallArguments, noop: Tensor | None = None, output: Any = None) -> Any:
    quantizer = like(call.quantizer, output, noop)

    def quantize(pieces: Sequence[Tensor]) -> tuple[list[Any], dict[str, Tensor]]:
        return [quantize_blocks(piece.contiguous(), quantizer) for piece in pieces], {}

    return grouped_tensor(x, call.quantizer, call, quantize, noop, output)


class GroupedKernels(Grouped):
    @by_name
    @requires(_into_blocks)
    def group_quantize(self, call: CallArguments) -> Any:
        if not takes(call.quantizer):
            return hand_over(self, "group_quantize", **vars(call))  # type: ignore[arg-type]
        return _quantized(_matrix(call.tensor), call, call.noop_flag, call.output)

    @by_name
    @requires(_into_blocks)
    def bgrad_group_quantize(self, call: CallArguments) -> Any:
        if not takes(call.quantizer):
            return hand_over(self, "bgrad_group_quantize", **vars(call))  # type: ignore[arg-type]
        x = _matrix(call.tensor)
        return with_sums(x, call, lambda: _quantized(x, call))

    @by_name
    @requires(_better_here)
    def te_general_grouped_gemm(self, call: CallArguments) -> Any:
        if not surely_disjoint((call.A, call.B, call.D or ())):
            check_outputs_disjoint("te_general_grouped_gemm", vars(call))
        problems, shapes = problems_of(call)
        gemm = self.generic_gemm  # type: ignore[attr-defined]
        solve(problems, shapes, call.transa, call.transb, call.grad, call.bias_type, gemm=gemm, multiply=_multiply)
        return call.bias

    te_general_grouped_gemm_for_grouped_tensor, te_general_grouped_gemm_for_discrete_in, te_general_grouped_gemm_for_discrete_out = map(
        _of_groups, GROUPED_PRODUCTS
    )

    def _multiply_groups(self, call: CallArguments) -> None:
        gemm = self.generic_gemm  # type: ignore[attr-defined]

        def compute(problems: list[Problem], shapes: list[GemmShape]) -> None:
            solve(problems, shapes, call.transa, call.transb, False, None, gemm=gemm, multiply=_multiply)

        multiply_groups(call, compute)


def _matrix(x: Tensor) -> Tensor:
    x = unquantized(x)
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _multiply(problem: Problem, transa: bool, transb: bool) -> None:
    A, B, D = problem.A.contiguous(), problem.B.contiguous(), problem.D
    bias = None if problem.bias is None else problem.bias.contiguous().view(-1)
    native.gemm(B, transb, B.dtype, 1.0, A, transa, A.dtype, 1.0, D, D.dtype, bias=bias)
