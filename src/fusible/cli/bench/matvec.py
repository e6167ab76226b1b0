"""The table ``matvec``: what a token of generation does with a weight."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fusible.cli.bench.fp8 import fp8, product
from fusible.cli.bench.table import Case, Measured, Settings

__all__ = ["matvec"]

_TARGETS = {1: 2.5, 2: None, 4: None, 8: 2.0, 16: None}


def matvec(settings: Settings) -> Measured:
    """A weight of ``[8192, 8192]`` in E4M3 times 1 to 16 rows of bf16, beside torch with the weight in bf16."""
    n = 64 if settings.quick else 8192
    weight = torch.randn(n, n) / n**0.5
    quantized, plain = fp8(weight), weight.bfloat16()
    measured = Measured()
    for rows, target in _TARGETS.items():
        x = torch.randn(rows, n).bfloat16()
        flops, nbytes = 2.0 * rows * n**2, n**2 + 4.0 * rows * n
        case = Case(f"[{n}, {n}] x {rows}", lambda x=x: F.linear(x, plain), lambda x=x: product(quantized, x), target, flops, nbytes)
        measured.rows += settings.measure([case])
    return measured
