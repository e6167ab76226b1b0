"""FP8 attention: operands are read as fp32, results are quantized once they are whole, and the scores are only observed.

Nothing between is rounded to FP8, so the scales of the scores' quantizers change no result; their amaxes are what a rounding kernel would see. Of
MXFP8 operands one copy is read, the one along the head's dimension where it is there; results are in high precision.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusible.errors import NotServedError, ShapeError, expected
from fusible.tex.backends.torch_backend.blocks import scale_blocks_
from fusible.tex.backends.torch_backend.fp8 import decode, tensor_amax
from fusible.tex.backends.torch_backend.number_formats import decode_e8m0
from fusible.tex.backends.torch_backend.operands import dense
from fusible.tex.backends.torch_backend.quantizing import emit
from fusible.tex.calls.attention_layout import QKVLayout, format_name
from fusible.tex.calls.scale_order import unswizzle
from fusible.tex.formats import MXFP8, WAYS, format_named, format_of, is_quantized, nominal, scheme_of
from fusible.tex.interface.declare import CallArguments, Request
from fusible.tex.protocol import QuantizerLike, fp8_format, to_torch

__all__ = ["Amax", "quantized_gradients", "quantizes", "read", "refused_formats", "result_dtype", "without_gradient"]


def refused_formats(request: Request) -> str | None:
    """Why attention refuses a request for the number format of an argument, or None."""
    for name, kind in request.kinds:
        if isinstance(kind, tuple) and len(kind) == 3:
            form = format_named(kind[0])
            if form is None or not (form.per_tensor or form is MXFP8):
                return f"serves FP8 of one scale per tensor and MXFP8, and {name} is {kind[0]}"
        if name.endswith("quantizer") and isinstance(kind, str):
            return f"serves Float8 quantizers, and {name} is a {kind}"
    return None


class Amax:
    """The largest magnitude of the tensors seen, for a quantizer of delayed scaling; of no other quantizer is anything recorded."""

    def __init__(self, quantizer: QuantizerLike | None) -> None:
        self._quantizer: Any = quantizer if scheme_of(quantizer).delayed else None
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


def read(call: CallArguments, **orders: Any) -> None:
    """Replace the quantized tensors among the arguments of a call by their fp32 values; ``orders`` are their dimensions by name."""
    for name, order in orders.items():
        x = getattr(call, name)
        if is_quantized(x):
            scales = call.do_scale_inv_format if name == "dO" else call.qkv_scale_inv_format
            setattr(call, name, _mxfp8_values(x, name, order, scales) if format_of(x) is MXFP8 else dense(x))


def without_gradient(call: CallArguments) -> None:
    """Drop from ``Aux_CTX_Tensors`` the gradient in high precision, which they end with where dO is MXFP8."""
    if format_of(call.dO) is MXFP8:
        call.Aux_CTX_Tensors = list(call.Aux_CTX_Tensors)[:-1]


def _mxfp8_values(x: Any, name: str, order: str, scale_format: Any) -> Tensor:
    """The values of an MXFP8 tensor whose data lies in ``order``, such as ``SBHD``, and whose scales are those of the matrix ``[B * H * S, D]``."""
    if format_name(scale_format, order) != "BHSD" or sorted(order) != sorted("BHSD"):
        got = f"{order} with scales of {format_name(scale_format, order)}"
        raise NotServedError(expected("scales of BHSD", of=f"{name}, which is MXFP8", got=got, do="quantize it by heads"))
    way, length = WAYS[x._rowwise_data is None], MXFP8.length
    to = [order.index(dimension) for dimension in "BHSD"]
    data = getattr(x, f"_{way}_data").permute(to)
    rows, width = math.prod(data.shape[:3]), data.shape[3]
    if data.shape[2] % length or width % length:
        of, do = f"{name}, which is MXFP8", "pad it with zeros"
        raise ShapeError(expected(f"tokens and widths of heads in multiples of {length}", of=of, got=list(data.shape[2:]), do=do))
    scales, columns = getattr(x, f"_{way}_scale_inv"), way == "columnwise"
    scales = scales.view(-1, scales.shape[-1])
    scales = unswizzle(scales, columns) if x._with_gemm_swizzled_scales else scales
    scales = scales[: rows // length, :width] if columns else scales[:rows, : width // length]
    values = decode(data.reshape(rows, width), x._fp8_dtype)
    scale_blocks_(values, decode_e8m0(scales.contiguous()), MXFP8.block(way, False))
    return values.view(data.shape).permute([to.index(i) for i in range(4)])


def result_dtype(x: Any, fake_dtype: Any) -> torch.dtype:
    """The dtype of what is computed from ``x``: that of ``x``, or ``fake_dtype`` or the nominal dtype where ``x`` is quantized."""
    if not is_quantized(x):
        return x.dtype
    return nominal(x) if fake_dtype is None else to_torch(fake_dtype)


def quantizes(quantizer: Any) -> bool:
    """Whether results are handed over quantized: by delayed scaling; what is scaled by its own amax is left to the caller, in high precision."""
    if not scheme_of(quantizer).delayed:
        return False
    fp8_format(quantizer.dtype)
    return True


def quantized_gradients(gradients: tuple[Tensor, Tensor, Tensor], lay: QKVLayout, quantizer: QuantizerLike | None, dtype: torch.dtype) -> list[Any]:
    """dQ, dK, dV, quantized by one quantizer. Where ``lay`` packs them, their bytes are views of one buffer, as the values were."""
    found = [emit(x, quantizer, dtype) for x in gradients]
    packed = found[3 - lay.packed :]
    if lay.packed > 1 and all(x._data is not None for x in packed):
        buffer = torch.stack([x._data for x in packed], lay.at)
        for x, part in zip(packed, buffer.unbind(lay.at), strict=True):
            x._data = part
    return found
