"""The table ``casts``: to FP8 and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fusible import tex
from fusible.cli.bench.fp8 import BF16, E4M3, cast, delayed, fp8, transpose
from fusible.cli.bench.table import Case, Measured, Settings
from fusible.quantized import FP8_MAX, Float8CurrentScalingQuantizer

__all__ = ["casts"]


def casts(settings: Settings) -> Measured:
    """E4M3 of ``[4096, 1024]`` with the transposed copy that backward needs, from fp32 and bf16, and decoded to bf16.

    Torch calculates in the dtype of its input, though from bf16 that rounds twice.
    """
    rows, cols = (64, 32) if settings.quick else (4096, 1024)
    return settings.measure_apart(_cases(rows, cols))


def _cases(rows: int, cols: int) -> Iterator[Case]:
    for dtype, name, target in ((torch.float32, "fp32", 5.0), (torch.bfloat16, "bf16", None)):
        yield from _to_fp8(torch.randn(rows, cols).to(dtype), name, target)
    quantized = fp8(torch.randn(rows, cols))
    codes = quantized._data.view(torch.float8_e4m3fn)
    yield Case("E4M3 to bf16", lambda: codes.to(torch.bfloat16), lambda: tex.dequantize(quantized, BF16), 12.0, nbytes=3 * rows * cols)


def _to_fp8(x: Tensor, name: str, target: float | None) -> Iterator[Case]:
    scale = torch.tensor(3.0)
    by_own_amax, by_scale = Float8CurrentScalingQuantizer(E4M3), delayed(scale, columnwise=True)
    codes = 2 * x.numel()  # and their transposed copy

    def current() -> tuple[Tensor, ...]:
        own = FP8_MAX[E4M3] / x.abs().amax()
        y = cast(x, own)
        return y, transpose(y), 1 / own

    def known() -> tuple[Tensor, ...]:
        y = cast(x, scale)
        return y, transpose(y), x.abs().amax()

    yield Case(f"{name} by current scaling", current, lambda: tex.quantize(x, by_own_amax), target, nbytes=2 * x.nbytes + codes)
    yield Case(f"{name} by delayed scaling", known, lambda: tex.quantize(x, by_scale), nbytes=x.nbytes + codes)
    with_bias = f"{name} by delayed scaling, with bias gradient"
    yield Case(with_bias, lambda: (*known(), x.sum(0)), lambda: tex.bgrad_quantize(x, by_scale), nbytes=x.nbytes + codes)
