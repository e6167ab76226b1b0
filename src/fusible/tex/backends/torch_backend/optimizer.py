"""Optimizer kernels over lists of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.fp8 import encode, tensor_amax
from fusible.tex.backends.torch_backend.number_formats import encode_e8m0, scale_of_amax
from fusible.tex.calls.optimizer import AdamRule, check_float_lists, check_typed_lists
from fusible.tex.calls.transaction import Write, commit
from fusible.tex.enums import DType
from fusible.tex.interface.declare import by_name
from fusible.tex.interface.optimizer import Optimizer
from fusible.tex.protocol import FLT_MAX, FP8_MAX, fp8_format

__all__ = ["OptimizerKernels"]

_FP32 = (torch.float32,)
_FLOATING = (torch.float32, torch.bfloat16, torch.float16)
_BYTES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
_E8M0 = (torch.uint8, torch.float8_e8m0fnu)


class OptimizerKernels(Optimizer):
    def multi_tensor_scale(self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], scale: float) -> None:
        check_float_lists(tensor_lists, (2,), "multi_tensor_scale", Tensor.numel, _FLOATING)
        _scale(noop_flag, tensor_lists, scale)

    def multi_tensor_scale_tensor(self, chunk_size: int, is_infinite: Any, tensor_lists: Sequence[Sequence[Any]], scale: Any) -> None:
        check_float_lists(tensor_lists, (2,), "multi_tensor_scale_tensor", Tensor.numel, _FLOATING)
        _scale(is_infinite, tensor_lists, scale.view(()))

    def multi_tensor_l2norm(
        self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], per_tensor_python: bool | None
    ) -> tuple[Any, Any]:
        check_float_lists(tensor_lists, (1,), "multi_tensor_l2norm", Tensor.numel, _FLOATING)
        return _norms(noop_flag, [torch.linalg.vector_norm(x, dtype=torch.float32) for x in tensor_lists[0]], per_tensor_python)

    def multi_tensor_unscale_l2norm(
        self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], inv_scale: Any, per_tensor_python: bool | None
    ) -> tuple[Any, Any]:
        check_float_lists(tensor_lists, (1,), "multi_tensor_unscale_l2norm", Tensor.numel, _FLOATING)
        factor = inv_scale.view(())
        return _norms(noop_flag, [torch.linalg.vector_norm(x.float() * factor) for x in tensor_lists[0]], per_tensor_python)

    @by_name
    def multi_tensor_adam(self, call: Any) -> None:
        check_float_lists(call.tensor_lists, (4, 5), "multi_tensor_adam", Tensor.numel, _FLOATING)
        adam = _Adam.of(call)
        for g, p, m, v, *master in zip(*call.tensor_lists, strict=True):
            new, *moments = adam.step(g.float(), (master[0] if master else p).float(), m, v)
            commit([*_puts((m, v), moments), *(partial(weight.copy_, new) for weight in (p, *master))])

    @by_name
    def multi_tensor_adam_param_remainder(self, call: Any) -> None:
        types = (_FLOATING, (torch.bfloat16,), _FLOATING, _FLOATING, (torch.int16,))
        check_typed_lists(call.tensor_lists, types, "multi_tensor_adam_param_remainder")
        adam = _Adam.of(call)
        for g, p, m, v, remainder in zip(*call.tensor_lists, strict=True):
            master = (p.view(torch.int16).to(torch.int32) << 16) + remainder
            value, *moments = adam.step(g.float(), master.view(torch.float32), m, v)
            new = value.view(torch.int32)
            low = new.to(torch.int16)  # signed
            commit([*_puts((m, v), moments), partial(remainder.copy_, low), partial(p.view(torch.int16).copy_, (new - low) >> 16)])

    @by_name
    def multi_tensor_adam_fp8(self, call: Any) -> None:
        fp8 = fp8_format(call.fp8_dtype)
        check_typed_lists(call.tensor_lists, (_FLOATING, _BYTES, _FLOATING, _FLOATING, _FP32, _FP32, _FP32, _FP32), "multi_tensor_adam_fp8", single=3)
        adam = _Adam.of(call)
        for g, p, m, v, master, scale, amax, scale_inv in zip(*call.tensor_lists, strict=True):
            new, *moments = adam.step(g.float(), master, m, v)
            numbers = torch.maximum(amax, tensor_amax(new).view(amax.shape)), scale.reciprocal().view(scale_inv.shape)
            bytes_ = encode(new * scale.view(()), fp8)
            commit(_puts((m, v, master, amax, scale_inv, p.view(torch.uint8)), (*moments, new, *numbers, bytes_)))

    @by_name
    def multi_tensor_adam_capturable(self, call: Any) -> None:
        check_float_lists(call.tensor_lists, (4,), "multi_tensor_adam_capturable", Tensor.numel, _FLOATING)
        _adam_on_device(call)

    @by_name
    def multi_tensor_adam_capturable_master(self, call: Any) -> None:
        check_typed_lists(call.tensor_lists, (_FLOATING, _FLOATING, _FLOATING, _FLOATING, _FP32), "multi_tensor_adam_capturable_master")
        _adam_on_device(call)

    @by_name
    def multi_tensor_sgd(self, call: Any) -> None:
        check_float_lists(call.tensor_lists, (3, 4), "multi_tensor_sgd", Tensor.numel, _FLOATING)
        skip = call.noop_flag.view(()) != 0
        for g, p, mom, *copies in zip(*call.tensor_lists, strict=True):
            value, update = p.float(), g.float() * call.scale
            if call.wd and not call.wd_after_momentum:
                update.add_(value, alpha=call.wd)
            writes: list[Write] = []
            if call.momentum:
                moved = update if call.first_run else torch.add(mom.float() * call.momentum, update, alpha=1 - call.dampening)
                writes += _puts([mom], [moved], skip)
                update = update.add(moved, alpha=call.momentum) if call.nesterov else moved
            if call.wd and call.wd_after_momentum:
                update = update.add(value, alpha=call.wd)
            new = value.sub(update, alpha=call.lr)
            commit([*writes, *_puts((p, *copies), [new] * (1 + len(copies)), skip)])

    @by_name
    def multi_tensor_compute_scale_and_scale_inv(self, call: Any) -> None:
        check_typed_lists(call.tensor_lists, (_FP32, _FP32, _FP32), "multi_tensor_compute_scale_and_scale_inv")
        for amax, scale, scale_inv in zip(*call.tensor_lists, strict=True):
            scale.copy_(scale_of_amax(amax, call.max_fp8, call.epsilon, call.force_pow_2_scales, FLT_MAX).view(scale.shape))
            scale_inv.copy_(scale.reciprocal().view(scale_inv.shape))

    def multi_tensor_compute_scale_inv_e8m0(self, chunk_size: int, dummy: Any, tensor_lists: Sequence[Sequence[Any]]) -> None:
        check_typed_lists(tensor_lists, (_FLOATING, _E8M0), "multi_tensor_compute_scale_inv_e8m0")
        for amax, out in zip(*tensor_lists, strict=True):
            # A product, as in the MXFP8 cast: the quotient would be rounded otherwise.
            out.view(torch.uint8).copy_(encode_e8m0(amax.float() * (1 / FP8_MAX[DType.kFloat8E4M3])).view(out.shape))


def _scale(flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], scale: float | Tensor) -> None:
    for x, out in zip(*tensor_lists, strict=True):
        finite = x.isfinite().all()
        out.copy_(x.float() * scale)
        flag.masked_fill_(~finite, 1)


def _norms(flag: Tensor, norms: list[Tensor], each: bool | None) -> tuple[Tensor, Tensor]:
    empty = torch.empty(0, dtype=torch.float32, device=flag.device)
    if not norms:
        return torch.zeros(1, dtype=torch.float32, device=flag.device), empty
    stacked = torch.stack(norms)
    norm = torch.linalg.vector_norm(stacked).view(1)
    flag.masked_fill_(~norm.isfinite(), 1)
    return norm, stacked if each else empty


def _puts(old: Sequence[Tensor], new: Sequence[Tensor], skip: Tensor | None = None) -> list[Write]:
    """Round each of ``new`` into its tensor of ``old``, except where ``skip`` (one flag)."""
    pairs = zip(old, new, strict=True)
    return [partial(into.copy_, value if skip is None else torch.where(skip, into, value)) for into, value in pairs]


class _Adam(AdamRule):
    def step(self, gradient: Tensor, value: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The new value of a parameter and its new moments, all fp32."""
        if self.l2:
            gradient = gradient.add(value, alpha=self.l2)
        first = torch.add(m.float() * self.beta1, gradient, alpha=1 - self.beta1)
        second = torch.addcmul(v.float() * self.beta2, gradient, gradient, value=1 - self.beta2)
        update = (first / self.correction1).div_((second / self.correction2).sqrt_().add_(self.epsilon))
        if self.decoupled:
            update.add_(value, alpha=self.decoupled)
        new = value - update.mul_(self.lr) if isinstance(self.lr, Tensor) else value.sub(update, alpha=self.lr)
        return new, first, second


def _adam_on_device(call: Any) -> None:
    """A step whose rate, count and gradient scale are tensors, none of which is read back."""
    corrections = (1.0, 1.0)
    if call.bias_correction:
        steps = call.step.view(()).float()
        corrections = _correction(call.beta1, steps), _correction(call.beta2, steps)
    adam = _Adam.of(call, call.lr.view(()).float(), corrections)
    skip, factor = call.noop_flag.view(()) == 1, call.inv_scale.view(())
    for g, p, m, v, *master in zip(*call.tensor_lists, strict=True):
        gradient = g.float() * factor
        new, *moments = adam.step(gradient, (master[0] if master else p).float(), m, v)
        commit(_puts((m, v, g, p, *master), (*moments, gradient, new, *[new] * len(master)), skip))


def _correction(beta: float, steps: Tensor) -> Tensor:
    """``1 - beta^steps``, without the cancellation of fp32 where ``beta`` is close to 1."""
    return -torch.expm1(steps * math.log(beta)) if beta else torch.ones_like(steps)
