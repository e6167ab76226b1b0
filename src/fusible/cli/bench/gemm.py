"""The table ``gemm``: matrix products of FP8 operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from fusible.cli.bench.fp8 import cast, delayed, fp8, product
from fusible.cli.bench.table import Case, Measured, Settings

__all__ = ["gemm"]

_SCALED_UP_TO = 2048
"""torch's own FP8 product is some six times slower than its bf16 one: larger sizes cost time and show nothing new."""


def gemm(settings: Settings) -> Measured:
    """Products of ``n^3`` from E4M3 to bf16 in the layouts of forward (TN), input gradient (NN) and weight gradient (NT), beside torch's bf16
    product of the same layout and its FP8 product, which knows one layout; and one with bias, GELU and FP8 output."""
    measured = Measured()
    squares = settings.measure_growing((32, 64) if settings.quick else (256, 512, 1024, 2048, 4096), lambda n: _square(n, measured))
    measured.rows += squares.rows
    measured.notes += squares.notes
    sizes = (64, 32, 48) if settings.quick else (4096, 1024, 4096)
    measured.rows += settings.measure([_fused(*sizes)])
    return measured


def _square(n: int, measured: Measured) -> list[Case]:
    """Weights ``[out, in]`` and rows, as a layer has them: the left operand of ``product`` is the first letter of the layout."""
    a, b = torch.randn(n, n), torch.randn(n, n)
    ab, bb, a8, b8 = a.bfloat16(), b.bfloat16(), fp8(a), fp8(b)
    work = {"flops": 2.0 * n**3, "nbytes": 4.0 * n**2}
    ours: dict[str, Callable[[], object]] = {layout: lambda layout=layout: product(a8, b8, layout) for layout in ("TN", "NN", "NT")}
    theirs: dict[str, Callable[[], object]] = {"TN": lambda: bb @ ab.t(), "NN": lambda: bb @ ab, "NT": lambda: bb.t() @ ab}
    cases = [Case(f"{n}^3, {layout}, torch in bf16", theirs[layout], ours[layout], 0.8, kind=layout, **work) for layout in ours]
    if n <= _SCALED_UP_TO:
        x, w, one = b8._data.view(torch.float8_e4m3fn), a8._data.view(torch.float8_e4m3fn), torch.ones(())

        def scaled() -> torch.Tensor:
            return torch.ops.aten._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16)

        try:
            scaled()
        except (RuntimeError, AttributeError, TypeError) as error:
            measured.notes.append(f"torch's FP8 product of {n}^3 is left out: {str(error).splitlines()[0]}.")
        else:
            cases.append(Case(f"{n}^3, TN, torch in FP8 (_scaled_mm)", scaled, ours["TN"], 2.2, kind="_scaled_mm", **work))
    return cases


def _fused(rows: int, inner: int, cols: int) -> Case:
    x, w, bias, scale = torch.randn(rows, inner), torch.randn(cols, inner) / inner**0.5, torch.randn(cols).bfloat16(), torch.tensor(16.0)
    xb, wb, x8, w8, quantizer = x.bfloat16(), w.bfloat16(), fp8(x), fp8(w), delayed(scale)

    def plain() -> tuple[torch.Tensor, torch.Tensor]:
        before = F.linear(xb, wb, bias)
        return before, cast(F.gelu(before, approximate="tanh"), scale)

    return Case(
        f"[{rows} x {inner}] x [{inner} x {cols}] + bias, GELU, to FP8",
        plain,
        lambda: product(w8, x8, quantizer=quantizer, bias=bias, gelu=True),
        1.2,
        flops=2.0 * rows * inner * cols,
        nbytes=(rows + cols) * inner + 3.0 * rows * cols,  # the input of GELU is kept in bf16
    )
