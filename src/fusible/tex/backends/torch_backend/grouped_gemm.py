"""Bare products of matrices by torch: one by one, or many in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.exact_sums import exact_sums
from fusible.tex.calls.gemm import GemmShape
from fusible.tex.calls.grouped_products import Problem, bare_key

__all__ = ["as_one_batch", "multiply"]


def multiply(problem: Problem, transa: bool, transb: bool) -> None:
    """One product straight into its place, by one torch kernel that rounds once."""
    b, a = problem.B.t() if transb else problem.B, problem.A.t() if transa else problem.A
    with exact_sums(b):
        if problem.bias is None:
            torch.mm(b, a, out=problem.D)
        else:
            torch.addmm(problem.bias.view(-1), b, a, out=problem.D)


def as_one_batch(problems: Sequence[Problem], shapes: Sequence[GemmShape], transa: bool, transb: bool) -> bool:
    """Whether the products were computed by one ``torch.bmm``: those of stacked matrices, equally many rows each.

    On a CPU its threads take an expert each, where a product for each expert makes all threads meet 64 times (1.1x its time).
    """
    first = problems[0] if problems else None
    if first is None or len(problems) == 1 or shapes[0].empty or any(shape is not shapes[0] for shape in shapes) or bare_key(first) is None:
        return False
    stacks = [_stack([getattr(problem, name) for problem in problems]) for name in ("B", "A", "D")]
    if any(stack is None for stack in stacks):
        return False
    b, a, d = stacks
    with exact_sums(b):
        torch.bmm(b.mT if transb else b, a.mT if transa else a, out=d)
    return True


def _stack(matrices: Sequence[Tensor]) -> Any:
    """The three-dimensional view of matrices of one shape that lie evenly in one storage; ``None`` where they do not."""
    first = matrices[0]
    start, strides = first.data_ptr(), first.stride()
    step = matrices[1].data_ptr() - start
    size = first.element_size()
    if step < first.numel() * size or any(m.data_ptr() != start + i * step or m.stride() != strides for i, m in enumerate(matrices)):
        return None
    storage = first.untyped_storage()
    end = start + (len(matrices) - 1) * step + size * (1 + sum((n - 1) * s for n, s in zip(first.shape, strides, strict=True)))
    if step % size or end > storage.data_ptr() + storage.nbytes():
        return None
    return first.as_strided((len(matrices), *first.shape), (step // size, *strides))
