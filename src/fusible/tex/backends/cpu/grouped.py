"""Grouped GEMM by the compiled kernel: each expert's product reads its weight once, as it lies in memory."""

from __future__ import annotations

from typing import Any

from fusible import cpp_extensions as native
from fusible.tex.backends.cpu.gemm import products_gain
from fusible.tex.calls.grouped_products import Problem, problems_of, solve
from fusible.tex.calls.memory_checks import check_outputs_disjoint, surely_disjoint
from fusible.tex.interface.declare import CallArguments, Request, by_name, requires
from fusible.tex.interface.grouped import Grouped

__all__ = ["GroupedKernels"]


def _better_here(request: Request) -> str | None:
    A, B = request["A"], request["B"]
    if not (isinstance(A, tuple) and isinstance(B, tuple)):
        return "reads lists of operands"
    if request["transb"] and A == B and request["D"] in (A, None):
        return "leaves weight gradients as wide as their operands to torch's own, which writes them in less time"
    is_plain = not request["transb"] and set(D if isinstance(D := request["D"], tuple) else (D,)) <= {None, *A}
    reasons = [reason for a in A for b in B if (reason := products_gain(a, b, is_plain)) is not None]
    return reasons[0] if reasons else None


class GroupedKernels(Grouped):
    @by_name
    @requires(_better_here)
    def te_general_grouped_gemm(self, call: CallArguments) -> Any:
        if not surely_disjoint((call.A, call.B, call.D or ())):
            check_outputs_disjoint("te_general_grouped_gemm", vars(call))
        problems, shapes = problems_of(call)
        gemm = self.generic_gemm  # type: ignore[attr-defined]
        solve(problems, shapes, call.transa, call.transb, call.grad, call.bias_type, gemm=gemm, multiply=_multiply)
        return call.bias


def _multiply(problem: Problem, transa: bool, transb: bool) -> None:
    A, B, D = problem.A.contiguous(), problem.B.contiguous(), problem.D
    bias = None if problem.bias is None else problem.bias.contiguous().view(-1)
    native.gemm(B, transb, B.dtype, 1.0, A, transa, A.dtype, 1.0, D, D.dtype, bias=bias)
