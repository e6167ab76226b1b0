"""Quantizing lazy tensors with one scale."""

from __future__ import annotations

from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.arrays import LAZY, fp32
from fusible.tex.backends.xla.block_formats import BLOCKS
from fusible.tex.backends.xla.fp8 import encode
from fusible.tex.backends.xla.number_formats import reciprocal
from fusible.tex.formulas.quantize import Quantizing

__all__ = ["QUANTIZING", "emit"]


def _raise_amax(quantizer: Any, former: Tensor, amax: Tensor, noop: Tensor | None) -> None:
    amax = lazy.maximum(former, lazy.reshape(amax, former.shape))
    quantizer.amax = amax if noop is None else LAZY.unless(noop, former, amax)


QUANTIZING = Quantizing(
    arrays=LAZY,
    blocks=BLOCKS,
    encode=lambda x, scale, dtype: encode(fp32(x) * scale, dtype),
    reciprocal=reciprocal,
    raise_amax=_raise_amax,
    check_same_device=lambda x, like, of: None,  # a program runs on one
)
emit = QUANTIZING.emit
