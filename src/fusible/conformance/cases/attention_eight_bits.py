"""Samples of attention in FP8: results are quantized by delayed scaling, and the quantizers of the scores take their amax.

A backend may or may not round probabilities to FP8 before it multiplies them. The bounds allow for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.cases.attention_drawn import BACKWARD, CALL, FORWARD
from fusible.conformance.eight_bits import HALF_STEP, cast, decoded, kept_within
from fusible.conformance.table import Arguments, Output, Sample
from fusible.quantized import Float8Quantizer, Float8TensorStorage
from fusible.tex import DType

__all__ = ["quantized_backward", "quantized_forward"]

_SHAPE, _SCALE = (2, 5, 4, 8), 0.3


def operand(generator: torch.Generator, fp8: DType, dtype: torch.dtype) -> tuple[Float8TensorStorage, Tensor]:
    """An operand of FP8, and its values in float64."""
    data = cast(torch.randn(_SHAPE, generator=generator), 4.0, fp8)
    storage = Float8TensorStorage(data=data, fp8_scale_inv=torch.tensor([0.25]), fp8_dtype=fp8, fake_dtype=dtype, quantizer=quantizer(fp8))
    return storage, decoded(data, fp8) / 4


_FORMER = 50.0
"""The amax of the results' quantizers before the call: more than that of the results."""


def quantizer(fp8: DType, former: float = 0.0) -> Float8Quantizer:
    return Float8Quantizer(torch.tensor([16.0]), torch.tensor([former]), fp8)


def near(place: int, wanted: Tensor, fp8: DType, size: float) -> Output:
    """The bytes of the result where they are within half a step of ``wanted`` and of a factor of at most ``size``, elsewhere the nearest ones."""

    def bits(result: Any, arguments: Arguments) -> Tensor:
        found = result[place]._data
        if found.shape != wanted.shape:
            return cast(wanted, 16.0, fp8)
        return kept_within(found, wanted, 1 / 16, fp8, HALF_STEP[fp8] * (wanted.abs() + size) + 2.0**-10)

    return Output(f"result.{place}._data", bits)


def seen(name: str, largest: float) -> Output:
    """The amax of a quantizer whose input may have been rounded before: within a step of E5M2."""

    def wanted(result: Any, arguments: Arguments) -> Tensor:
        found = arguments[name].amax
        return found.clone() if abs(found.item() - largest) <= 0.25 * largest else torch.tensor([largest])

    return Output(f"{name}.amax", wanted)


def probabilities(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """``(p [b, h, i, j], Stats [b, h, i, 1])``."""
    s = _SCALE * torch.einsum("bihd,bjhd->bhij", q, k)
    return torch.softmax(s, -1), torch.logsumexp(s, -1, keepdim=True)


def arguments_of(operands: list[Float8TensorStorage], dtype: torch.dtype) -> dict[str, Any]:
    options = {"max_seqlen_q": _SHAPE[1], "max_seqlen_kv": _SHAPE[1], "fake_dtype": dtype, "s_quantizer": quantizer(DType.kFloat8E4M3)}
    return {**CALL, **options, **dict(zip("QKV", operands, strict=True))}


def quantized_forward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of ``fused_attn_fwd`` in FP8."""
    fp8 = DType.kFloat8E4M3
    operands, (q, k, v) = zip(*(operand(generator, fp8, dtype) for _ in range(3)), strict=True)
    p, stats = probabilities(q, k)
    o = torch.einsum("bhij,bjhe->bihe", p, v)
    outputs = (
        near(0, o, fp8, v.abs().max().item()), Output(1, stats, length=64, magnitude=8.0), seen("s_quantizer", p.max().item()),
        Output("o_quantizer.amax", torch.tensor([_FORMER])), Output("result.0._scale_inv", torch.tensor([1 / 16])),
    )  # fmt: skip
    yield Sample("FP8", {**arguments_of([*operands], dtype), **FORWARD, "o_quantizer": quantizer(fp8, _FORMER)}, outputs)


def quantized_backward(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of ``fused_attn_bwd`` in FP8."""
    fp8, gradient = DType.kFloat8E4M3, DType.kFloat8E5M2
    operands, (q, k, v) = zip(*(operand(generator, fp8, dtype) for _ in range(3)), strict=True)
    p, stats = probabilities(q, k)
    held_o, o = operand(generator, fp8, dtype)
    held_do, do = operand(generator, gradient, dtype)
    ds = p * (torch.einsum("bihe,bjhe->bhij", do, v) - (do * o).sum(-1).transpose(1, 2)[..., None])
    made = {
        0: _SCALE * torch.einsum("bhij,bjhd->bihd", ds, k), 1: _SCALE * torch.einsum("bhij,bihd->bjhd", ds, q),
        2: torch.einsum("bhij,bihe->bjhe", p, do),
    }  # fmt: skip
    more = {
        "O": held_o, "dO": held_do, "Aux_CTX_Tensors": [stats.float(), torch.zeros(2, dtype=torch.int64)], "s_quantizer": None,
        "dp_quantizer": quantizer(gradient), "dqkv_quantizer": quantizer(gradient, _FORMER),
    }  # fmt: skip
    size = _SHAPE[1] * ds.abs().max().item()
    outputs = [near(place, x, gradient, size) for place, x in made.items()]
    amaxes = seen("dp_quantizer", ds.abs().max().item()), Output("dqkv_quantizer.amax", torch.tensor([_FORMER]))
    outputs += [Output(f"result.{place}._scale_inv", torch.tensor([1 / 16])) for place in made]
    yield Sample("FP8", {**arguments_of([*operands], dtype), **BACKWARD, **more}, (*outputs, *amaxes))
