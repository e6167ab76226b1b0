"""The table ``formats``: casts to every number format, and products of operands in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusible import tex
from fusible.cli.bench.fp8 import E4M3, product
from fusible.cli.bench.table import Case, Measured, Settings
from fusible.models.checkpoints.mxfp4 import MXFP4WeightQuantizer
from fusible.quantized import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer, NVFP4Quantizer

__all__ = ["formats"]

Call = Callable[[], object]

_CASTS = {
    "FP8, one scale": Float8CurrentScalingQuantizer(E4M3),
    "FP8, 1x128 blocks": Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "FP8, 128x128 blocks": Float8BlockQuantizer(E4M3),
    "MXFP8": MXFP8Quantizer(E4M3),
    "NVFP4": NVFP4Quantizer(),
    "NVFP4, Hadamard transform, rounded at random": NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=True),
}
_PRODUCTS = {
    "FP8, one scale": (Float8CurrentScalingQuantizer(E4M3), 1.0),
    "FP8, 1x128 blocks, scales of powers of two": (Float8BlockQuantizer(E4M3, block_scaling_dim=1), 0.9),
    "FP8, 1x128 blocks, scales of fp32": (Float8BlockQuantizer(E4M3, block_scaling_dim=1, force_pow_2_scales=False), 0.9),
    "MXFP8": (MXFP8Quantizer(E4M3), 0.9),
    "NVFP4": (NVFP4Quantizer(), 0.9),
    "MXFP4": (MXFP4WeightQuantizer(), 1.3),
}
"""Each with the target of its products, beside torch's in bf16."""


def formats(settings: Settings) -> Measured:
    """Casts of ``[4096, 1024]`` to rows and columns, beside the same by torch's operations, and products of ``n^3`` in every layout, beside torch's
    in bf16. A note says which part of a copy's bandwidth the casts reach: their bytes, read and written once, over their time."""
    measured = Measured()
    shape = (128, 128) if settings.quick else (4096, 1024)
    x = torch.randn(shape)
    copied = torch.empty_like(x)
    copy = _seconds(settings, lambda: copied.copy_(x))
    for dtype in (torch.float32, torch.bfloat16):
        cases = list(_casts(x.to(dtype)))
        found = settings.measure_apart(cases)
        measured.rows += found.rows
        shares = [case.nbytes / row.fusible * 1e3 / (2 * x.nbytes / copy) for case, row in zip(cases, found.rows, strict=True)]
        measured.notes.append("Of a copy's bandwidth: " + "; ".join(f"{c.what} {share:.2f}" for c, share in zip(cases, shares, strict=True)) + ".")
    products = settings.measure_growing((128,) if settings.quick else (512, 1024, 2048, 4096), _products)
    measured.rows += products.rows
    measured.notes += products.notes
    return measured


def _seconds(settings: Settings, call: Call) -> float:
    return settings.measure([Case("", call, call)])[0].fusible / 1e3


def _casts(x: Tensor) -> Iterator[Case]:
    by_torch = tex.registry.find("torch")
    for name, quantizer in _CASTS.items():
        made = quantizer(x)
        nbytes = x.nbytes + _bytes(made)
        what = f"{str(x.dtype).removeprefix('torch.')} to {name}, both copies"
        plain: Call = lambda quantizer=quantizer: by_torch.quantize(x, quantizer, None, None)  # noqa: E731
        yield Case(what, plain, lambda quantizer=quantizer: tex.quantize(x, quantizer), 10.0, nbytes=nbytes)


def _products(n: int) -> list[Case]:
    a, b = torch.randn(n, n), torch.randn(n, n)
    ab, bb = a.bfloat16(), b.bfloat16()
    theirs: dict[str, Call] = {"TN": lambda: bb @ ab.t(), "NN": lambda: bb @ ab, "NT": lambda: bb.t() @ ab}
    cases = []
    for name, (quantizer, target) in _PRODUCTS.items():
        left, right = quantizer(a), quantizer(b)
        for layout in theirs if quantizer.columnwise_usage else ("TN",):
            ours: Call = lambda left=left, right=right, layout=layout: product(left, right, layout)  # noqa: E731
            nbytes = (_bytes(left) + _bytes(right)) / sum(left.get_usages().values()) + 2.0 * n**2
            cases.append(Case(f"{n}^3, {layout}, {name}", theirs[layout], ours, target, flops=2.0 * n**3, nbytes=nbytes, kind=layout))
    return cases


def _bytes(x: Any) -> int:
    """Of all copies of a quantized tensor, scales included."""
    return sum(part.nbytes for part in x.get_metadata().values() if isinstance(part, Tensor))
