"""Small models, and the same models in float64 torch operations, 8-bit products imitated by rounding their operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fusible.pytorch as fp

__all__ = ["CASES", "Case", "Formats", "gradients"]

H, HEADS, GROUPS, BASE = 32, 4, 2, 10000.0

Scales = dict[str, Tensor] | None
"""Delayed scales by slot; None for current scaling."""


@dataclass(frozen=True)
class Formats:
    """How products quantize: the position of each op, the delayed scales, or whether current ones are powers of two."""

    positions: Sequence[int]
    scales: Scales
    powers_of_two: bool = False

    def scale(self, x: Tensor, largest: float, slot: str) -> Tensor:
        if self.scales is not None:
            return self.scales[slot].double()
        scale = largest / x.abs().max().float()
        return (scale.log2().floor().exp2() if self.powers_of_two else scale).double()


def _rounded(x: Tensor, dtype: torch.dtype, formats: Formats, slot: str) -> Tensor:
    largest = torch.finfo(dtype).max
    scale = formats.scale(x, largest, slot)
    return (x * scale).clamp(-largest, largest).float().to(dtype).double() / scale


class _Product(torch.autograd.Function):
    """``x @ w.T + b`` of quantized operands; backward quantizes ``dy`` (E5M2) after summing it for the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, formats: Formats, position: int) -> Tensor:
        x, w = (_rounded(t, torch.float8_e4m3fn, formats, f"{position}.{name}") for t, name in ((x, "x"), (w, "weight")))
        ctx.save_for_backward(x, w)
        ctx.formats, ctx.position = formats, position
        return x @ w.T + b

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dy = _rounded(dys[0], torch.float8_e5m2, ctx.formats, f"{ctx.position}.dy")
        return dy @ w, dy.T @ x, dys[0].sum(0), None, None


def _products(formats: Formats | None) -> Callable[..., Tensor]:
    if formats is None:
        return lambda x, w, b: x @ w.T + b
    positions = iter(formats.positions)
    return lambda x, w, b: _Product.apply(x, w, b, formats, next(positions))  # type: ignore[return-value]


def _rope(x: Tensor) -> Tensor:
    tokens, _, width = x.shape
    angles = torch.outer(torch.arange(tokens).double(), BASE ** (-torch.arange(0, width, 2).double() / width)).repeat(1, 2)[:, None]
    left, right = x.chunk(2, -1)
    return x * angles.cos() + torch.cat((-right, left), -1) * angles.sin()


def _attend(qkv: Tensor, lengths: Sequence[int], groups: int) -> Tensor:
    width = H // HEADS
    outputs = []
    for part in qkv.split(list(lengths)):
        q, k, v = (t.reshape(len(part), t.shape[1] // width, width) for t in part.split([H, groups * width, groups * width], -1))
        q, k = _rope(q), _rope(k)
        k, v = (t.repeat_interleave(HEADS // groups, 1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * width**-0.5
        mask = torch.ones(len(part), len(part)).tril().bool()
        outputs.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v).reshape(len(part), H))
    return torch.cat(outputs)


def _mlp_reference(x: Tensor, p: list[Tensor], lengths: Sequence[int], linear: Callable[..., Tensor]) -> Tensor:
    y = linear(F.layer_norm(x, (H,), p[0], p[1]), p[2], p[3])
    return x + linear(F.gelu(y, approximate="tanh"), p[4], p[5])


def _attention_reference(x: Tensor, p: list[Tensor], lengths: Sequence[int], linear: Callable[..., Tensor]) -> Tensor:
    return x + linear(_attend(linear(F.layer_norm(x, (H,), p[0], p[1]), p[2], p[3]), lengths, HEADS), p[4], p[5])


def _grouped_reference(x: Tensor, p: list[Tensor], lengths: Sequence[int], linear: Callable[..., Tensor]) -> Tensor:
    y = F.rms_norm(x, (H,), p[0], 1e-5)
    return x + linear(_attend(linear(y, p[1], p[2]), lengths, GROUPS), p[3], p[4])


@dataclass(frozen=True)
class Case:
    """``build(dtype)``: the model; ``reference``: its float64 twin; ``lengths``: of the sequences, per step, equal ones unless ``ragged``."""

    name: str
    build: Callable[[torch.dtype], fp.Sequential]
    reference: Callable[..., Tensor]
    lengths: Sequence[Sequence[int]]
    ragged: bool = False

    def input(self, step: int, dtype: torch.dtype) -> Tensor:
        """``[batch, seq, hidden]``, or ``[tokens, hidden]`` where ragged."""
        lengths = self.lengths[step % len(self.lengths)]
        x = torch.randn(sum(lengths), H, generator=torch.Generator().manual_seed(100 + step)).to(dtype)
        return x if self.ragged else x.view(len(lengths), lengths[0], H)

    def call(self, model: fp.Sequential, x: Tensor, step: int) -> Tensor:
        return model(x, torch.tensor(self.lengths[step % len(self.lengths)], dtype=torch.int32)) if self.ragged else model(x)

    def in_float64(self, model: fp.Sequential, x: Tensor, dy: Tensor, step: int, formats: Formats | None) -> list[Tensor]:
        """``y``, ``dx`` and the gradients of the parameters."""
        parameters = [p.detach().double().requires_grad_() for p in model.parameters()]
        leaf = x.detach().double().reshape(-1, H).requires_grad_()
        y = self.reference(leaf, parameters, self.lengths[step % len(self.lengths)], _products(formats))
        dx, *grads = torch.autograd.grad((y * dy.double().reshape(y.shape)).sum(), [leaf, *parameters])
        return [y.detach().view(x.shape), dx.view(x.shape), *grads]


def gradients(case: Case, model: fp.Sequential, x: Tensor, dy: Tensor, step: int) -> list[Tensor]:
    """``y``, ``dx`` and the gradients of the parameters, by the model; it keeps the latter for its optimizer."""
    model.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    y = case.call(model, leaf, step)
    (y * dy).sum().backward()
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[list-item, union-attr]


def _mlp(dtype: torch.dtype) -> fp.Sequential:
    body = (fp.LayerNorm(H, param_dtype=dtype), fp.Linear(H, 2 * H, param_dtype=dtype), fp.GELU(), fp.Linear(2 * H, H, param_dtype=dtype))
    return fp.Sequential(fp.Residual(*body))


def _attention(dtype: torch.dtype) -> fp.Sequential:
    attend = fp.MultiHeadedSelfAttention(H, HEADS, rope_base=BASE)
    body = (fp.LayerNorm(H, param_dtype=dtype), fp.Linear(H, 3 * H, param_dtype=dtype), attend, fp.Linear(H, H, param_dtype=dtype))
    return fp.Sequential(fp.Residual(*body))


def _grouped(dtype: torch.dtype) -> fp.Sequential:
    attend = fp.GroupedQuerySelfAttention(H, HEADS, GROUPS, rope_base=BASE)
    body = (fp.RMSNorm(H, param_dtype=dtype), fp.Linear(H, 2 * H, param_dtype=dtype), attend, fp.Linear(H, H, param_dtype=dtype))
    return fp.Sequential(fp.Residual(*body))


CASES = (
    Case("mlp", _mlp, _mlp_reference, [(8, 8)]),
    Case("attention", _attention, _attention_reference, [(8, 8)]),
    Case("grouped", _grouped, _grouped_reference, [(5, 11, 0), (3, 1, 12), (9, 0, 7), (16, 0, 0)], ragged=True),
)
