"""FP8 bytes: encoding, decoding, and the rule from amax to scale."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor

from fusible.tex.enums import DType
from fusible.tex.protocol import FLT_MAX, FP8_MAX, fp8_format, process_group

__all__ = ["ON_TORCH", "decode", "encode", "reduced", "scale_from_amax", "tensor_amax", "transpose_bytes"]

ON_TORCH = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
_LARGEST = {dtype: torch.tensor(largest, dtype=torch.float32, device="cpu") for dtype, largest in FP8_MAX.items()}

# 448 * _OVERFLOW is finite, and 480 * _OVERFLOW is infinite.
_OVERFLOW = FLT_MAX / 464


def encode(x: Tensor, dtype: DType) -> Tensor:
    """fp32 -> uint8: to nearest even, saturating (infinities too), NaN kept. Overwrites ``x``."""
    largest = FP8_MAX[dtype]
    return x.clamp_(-largest, largest).to(ON_TORCH[dtype]).view(torch.uint8)


def decode(data: Tensor, fp8_dtype: Any, to: torch.dtype = torch.float32) -> Tensor:
    """uint8 -> fp32, exactly; a new tensor. ``to``: another dtype that holds the numbers, where the data is not on a CPU.

    On a CPU, several times as fast as torch's own conversion (1.1 against 5.6 ms for 4 Mi elements on two Zen 4 cores): E5M2 is the high byte of
    an fp16; E4M3's exponent and mantissa, moved into an fp16's, give the value times 2^-8, save for NaN, which reads as 480 and is made NaN by
    ``inf * 0``.
    """
    if not data.is_cpu:
        return data.view(ON_TORCH[fp8_format(fp8_dtype)]).to(to)
    bits = data.view(torch.int8).to(torch.int16)
    if fp8_dtype == DType.kFloat8E5M2 or fp8_format(fp8_dtype) == DType.kFloat8E5M2:
        return bits.bitwise_left_shift_(8).view(torch.float16).float()
    values = bits.bitwise_left_shift_(7).bitwise_and_(-0x4001).view(torch.float16).float().mul_(256)
    return values.add_(values * _OVERFLOW, alpha=0)


def tensor_amax(x: Tensor) -> Tensor:
    """``max |x|``, fp32 ``[1]``; NaN where an element is NaN, 0 for an empty tensor."""
    if not x.numel():
        return x.new_zeros(1, dtype=torch.float32)
    amax = x.abs().amax()
    return (amax if amax.dtype is torch.float32 else amax.float()).view(1)


def scale_from_amax(amax: Tensor, dtype: DType, power_of_two: bool, epsilon: float) -> Tensor:
    """``fp8_max / max(amax, epsilon)``, correctly rounded and at most FLT_MAX; 1 where that amax is 0, infinite or NaN.

    With ``power_of_two``, rounded down to one.
    """
    if epsilon:
        amax = amax.clamp_min(epsilon)
    scale = torch.div(_LARGEST[dtype], amax).clamp_max_(FLT_MAX)
    scale = torch.where((amax > 0).logical_and_(amax <= FLT_MAX), scale, 1.0)
    if power_of_two:
        return scale.view(torch.int32).bitwise_and_(-0x800000).view(torch.float32)
    return scale


def reduced(amax: Tensor, quantizer: Any) -> Tensor:
    """The amaxes of current scaling, the largest of all processes where ``quantizer`` asks for it."""
    if quantizer.with_amax_reduction and not amax.is_meta:
        group = process_group(getattr(quantizer, "amax_reduction_group", None))
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    return amax


def transpose_bytes(data: Tensor) -> Tensor:
    """``[*leading, last] -> [last, *leading]``, contiguous."""
    return (data.t() if data.dim() == 2 else data.movedim(-1, 0)).contiguous()
