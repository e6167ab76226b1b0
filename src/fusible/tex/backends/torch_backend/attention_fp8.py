"""FP8 attention: operands are read as fp32, results are quantized once they are whole, and the scores are only observed.

Nothing between is rounded to FP8, so the scales of the scores' quantizers change no result; their amaxes are what a rounding kernel would see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusible.tex.attention_layout import Layout
from fusible.tex.backends.torch_backend.fp8 import tensor_amax
from fusible.tex.backends.torch_backend.operands import dense
from fusible.tex.backends.torch_backend.quantize import emit
from fusible.tex.interface.declare import Request
from fusible.tex.protocol import fp8_format, is_quantized, nominal, scaling, to_torch

__all__ = ["Amax", "quantized_gradients", "quantizes", "read", "refused_formats", "result_dtype"]


def refused_formats(request: Request) -> str | None:
    """Why attention refuses a request for the number format of an argument, or None."""
    for name, kind in request.kinds:
        if isinstance(kind, tuple) and len(kind) == 3 and kind[0] not in ("delayed", "current", "float8"):
            return f"serves FP8 of one scale per tensor, and {name} is {kind[0]}"
        if name.endswith("quantizer") and isinstance(kind, str):
            return f"serves Float8 quantizers, and {name} is a {kind}"
    return None


class Amax:
    """The largest magnitude of the tensors seen, for a quantizer of delayed scaling; of no other quantizer is anything recorded."""

    def __init__(self, quantizer: Any) -> None:
        self._quantizer = quantizer if scaling(quantizer) == "delayed" else None
        self._amax: Tensor | None = None

    def see(self, x: Tensor) -> None:
        if self._quantizer is not None:
            amax = tensor_amax(x)
            self._amax = amax if self._amax is None else torch.maximum(self._amax, amax)

    def record(self) -> None:
        """Raise the quantizer's amax to what was seen."""
        if self._quantizer is None or self._amax is None:
            return
        former = self._quantizer.amax
        if former is None:
            self._quantizer.amax = self._amax
        elif former.numel():
            former.copy_(torch.maximum(former, self._amax.view(former.shape)))


def read(call: Any, *names: str) -> None:
    """Replace the quantized tensors among the arguments of a call by their fp32 values."""
    for name in names:
        x = getattr(call, name)
        if is_quantized(x):
            setattr(call, name, dense(x))


def result_dtype(x: Any, fake_dtype: Any) -> torch.dtype:
    """The dtype of what is computed from ``x``: its own, or where it is quantized the one that it stands for."""
    if not is_quantized(x):
        return x.dtype
    return nominal(x) if fake_dtype is None else to_torch(fake_dtype)


def quantizes(quantizer: Any) -> bool:
    """Whether results are handed over quantized: by delayed scaling; what is scaled by its own amax is left to the caller, in high precision."""
    if scaling(quantizer) != "delayed":
        return False
    fp8_format(quantizer.dtype)
    return True


def quantized_gradients(gradients: tuple[Tensor, Tensor, Tensor], lay: Layout, quantizer: Any, dtype: torch.dtype) -> list[Any]:
    """dQ, dK, dV by one quantizer; the bytes of those that ``lay`` packs are views of one buffer, as the values were."""
    found = [emit(x, quantizer, dtype) for x in gradients]
    packed = found[3 - lay.packed :]
    if lay.packed > 1 and all(x._data is not None for x in packed):
        buffer = torch.stack([x._data for x in packed], lay.at)
        for x, part in zip(packed, buffer.unbind(lay.at), strict=True):
            x._data = part
    return found
