"""Optimizer kernels over lists of lazy tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla.fp8 import encode, tensor_amax
from fusible.tex.backends.xla.number_formats import encode_e8m0, reciprocal, scale_of_amax
from fusible.tex.backends.xla.operands import fp32
from fusible.tex.calls.optimizer import AdamRule, check_float_lists, check_typed_lists
from fusible.tex.enums import DType
from fusible.tex.interface.declare import by_name
from fusible.tex.interface.optimizer import Optimizer
from fusible.tex.protocol import FLT_MAX, FP8_MAX, fp8_format

__all__ = ["OptimizerKernels"]

_FP32 = (lazy.float32,)
_FLOATING = (lazy.float32, lazy.bfloat16, lazy.float16)
_BYTES = (lazy.uint8, lazy.float8, lazy.float8e5m2)


class OptimizerKernels(Optimizer):
    def multi_tensor_scale(self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], scale: float) -> None:
        check_float_lists(tensor_lists, (2,), "multi_tensor_scale", _shape, _FLOATING)
        _scale(noop_flag, tensor_lists, scale)

    def multi_tensor_scale_tensor(self, chunk_size: int, is_infinite: Any, tensor_lists: Sequence[Sequence[Any]], scale: Any) -> None:
        check_float_lists(tensor_lists, (2,), "multi_tensor_scale_tensor", _shape, _FLOATING)
        _scale(is_infinite, tensor_lists, _number(scale))

    def multi_tensor_l2norm(
        self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], per_tensor_python: bool | None = None
    ) -> tuple[Any, Any]:
        check_float_lists(tensor_lists, (1,), "multi_tensor_l2norm", _shape, _FLOATING)
        return _norms(noop_flag, [fp32(x) for x in tensor_lists[0]], per_tensor_python)

    def multi_tensor_unscale_l2norm(
        self, chunk_size: int, noop_flag: Any, tensor_lists: Sequence[Sequence[Any]], inv_scale: Any, per_tensor_python: bool | None = None
    ) -> tuple[Any, Any]:
        check_float_lists(tensor_lists, (1,), "multi_tensor_unscale_l2norm", _shape, _FLOATING)
        return _norms(noop_flag, [fp32(x) * _number(inv_scale) for x in tensor_lists[0]], per_tensor_python)

    @by_name
    def multi_tensor_adam(self, call: Any) -> None:
        check_float_lists(call.tensor_lists, (4, 5), "multi_tensor_adam", _shape, _FLOATING)
        adam = _Adam.of(call)
        for g, p, m, v, *master in zip(*call.tensor_lists, strict=True):
            new = adam.step(fp32(g), fp32(master[0] if master else p), m, v)
            for weight in (p, *master):
                _put(weight, new)

    @by_name
    def multi_tensor_adam_param_remainder(self, call: Any) -> None:
        types = (_FLOATING, (lazy.bfloat16,), _FLOATING, _FLOATING, (lazy.int16,))
        check_typed_lists(call.tensor_lists, types, "multi_tensor_adam_param_remainder")
        adam = _Adam.of(call)
        for g, p, m, v, remainder in zip(*call.tensor_lists, strict=True):
            master = (lazy.cast(lazy.bitcast(p, lazy.int16), lazy.int32) << 16) + lazy.cast(lazy.reshape(remainder, p.shape), lazy.int32)
            new = lazy.bitcast(adam.step(fp32(g), lazy.bitcast(master, lazy.float32), m, v), lazy.int32)
            low = lazy.cast(new, lazy.int16)  # the low word, signed
            high = lazy.shift_right_logical(new - lazy.cast(low, lazy.int32), 16)
            _put(remainder, low)
            p.assign_(lazy.bitcast(lazy.cast(high, lazy.int16), lazy.bfloat16))

    @by_name
    def multi_tensor_adam_fp8(self, call: Any) -> None:
        fp8 = fp8_format(call.fp8_dtype)
        check_typed_lists(call.tensor_lists, (_FLOATING, _BYTES, _FLOATING, _FLOATING, _FP32, _FP32, _FP32, _FP32), "multi_tensor_adam_fp8", single=3)
        adam = _Adam.of(call)
        for g, p, m, v, master, scale, amax, scale_inv in zip(*call.tensor_lists, strict=True):
            new = adam.step(fp32(g), master, m, v)
            master.assign_(new)
            amax.assign_(lazy.maximum(amax, lazy.reshape(tensor_amax(new), amax.shape)))
            scale_inv.assign_(lazy.reshape(reciprocal(scale), scale_inv.shape))
            p.assign_(lazy.bitcast(encode(new * _number(scale), fp8), p.dtype))

    @by_name
    def multi_tensor_adam_capturable(self, call: Any) -> None:
        check_float_lists(call.tensor_lists, (4,), "multi_tensor_adam_capturable", _shape, _FLOATING)
        _adam_of_tensors(call)

    @by_name
    def multi_tensor_adam_capturable_master(self, call: Any) -> None:
        check_typed_lists(call.tensor_lists, (_FLOATING, _FLOATING, _FLOATING, _FLOATING, _FP32), "multi_tensor_adam_capturable_master")
        _adam_of_tensors(call)

    @by_name
    def multi_tensor_sgd(self, call: Any) -> None:
        check_float_lists(call.tensor_lists, (3, 4), "multi_tensor_sgd", _shape, _FLOATING)
        skip: Any = _number(call.noop_flag) != 0
        for g, p, mom, *copies in zip(*call.tensor_lists, strict=True):
            value, update = fp32(p), fp32(g) * call.scale
            if call.wd and not call.wd_after_momentum:
                update = update + value * call.wd
            if call.momentum:
                moved = update if call.first_run else fp32(mom) * call.momentum + update * (1 - call.dampening)
                _put(mom, moved, skip)
                update = update + moved * call.momentum if call.nesterov else moved
            if call.wd and call.wd_after_momentum:
                update = update + value * call.wd
            new = value - update * call.lr
            for weight in (p, *copies):
                _put(weight, new, skip)

    @by_name
    def multi_tensor_compute_scale_and_scale_inv(self, call: Any) -> None:
        check_typed_lists(call.tensor_lists, (_FP32, _FP32, _FP32), "multi_tensor_compute_scale_and_scale_inv")
        for amax, scale, scale_inv in zip(*call.tensor_lists, strict=True):
            scale.assign_(lazy.reshape(scale_of_amax(amax, call.max_fp8, call.epsilon, call.force_pow_2_scales, FLT_MAX), scale.shape))
            scale_inv.assign_(lazy.reshape(reciprocal(scale), scale_inv.shape))

    def multi_tensor_compute_scale_inv_e8m0(self, chunk_size: int, dummy: Any, tensor_lists: Sequence[Sequence[Any]]) -> None:
        check_typed_lists(tensor_lists, (_FLOATING, (lazy.uint8,)), "multi_tensor_compute_scale_inv_e8m0")
        for amax, out in zip(*tensor_lists, strict=True):
            out.assign_(lazy.reshape(encode_e8m0(fp32(amax), 1 / FP8_MAX[DType.kFloat8E4M3]), out.shape))


def _number(x: Tensor) -> Tensor:
    return lazy.reshape(x, ())


def _scale(flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], scale: float | Tensor) -> None:
    for x, out in zip(*tensor_lists, strict=True):
        _raise_unless(lazy.all(lazy.is_finite(x)), flag)
        _put(out, fp32(x) * scale)


def _norms(flag: Tensor, tensors: list[Tensor], each: bool | None) -> tuple[Tensor, Tensor]:
    empty = lazy.zeros((0,))
    if not tensors:
        return lazy.zeros((1,)), empty
    squares = lazy.concatenate([lazy.reshape(lazy.sum(x * x), (1,)) for x in tensors], 0)
    norm = lazy.reshape(lazy.sqrt(lazy.sum(squares)), (1,))
    _raise_unless(lazy.all(lazy.is_finite(norm)), flag)
    return norm, lazy.sqrt(squares) if each else empty


def _put(old: Tensor, new: Tensor, skip: Tensor | None = None) -> None:
    """Round ``new`` into ``old``, except where ``skip`` (one flag)."""
    rounded = lazy.cast(new, old.dtype)
    old.assign_(lazy.reshape(rounded if skip is None else lazy.where(skip, old, rounded), old.shape))


class _Adam(AdamRule):
    def step(self, gradient: Tensor, value: Tensor, m: Tensor, v: Tensor, skip: Tensor | None = None) -> Tensor:
        """The new value of a parameter, all fp32; moves the moments on."""
        if self.l2:
            gradient = gradient + value * self.l2
        first = fp32(m) * self.beta1 + gradient * (1 - self.beta1)
        second = fp32(v) * self.beta2 + gradient * gradient * (1 - self.beta2)
        update = (first / self.correction1) / (lazy.sqrt(second / self.correction2) + self.epsilon)
        if self.decoupled:
            update = update + value * self.decoupled
        _put(m, first, skip)
        _put(v, second, skip)
        return value - update * self.lr


def _adam_of_tensors(call: Any) -> None:
    """A step whose rate, count and gradient scale are tensors: one program serves every step."""
    corrections = (1.0, 1.0)
    if call.bias_correction:
        corrections = _correction(call.beta1, _number(call.step)), _correction(call.beta2, _number(call.step))
    adam = _Adam.of(call, fp32(_number(call.lr)), corrections)
    skip: Any = _number(call.noop_flag) == 1
    factor = fp32(_number(call.inv_scale))
    for g, p, m, v, *master in zip(*call.tensor_lists, strict=True):
        gradient = fp32(g) * factor
        new = adam.step(gradient, fp32(master[0] if master else p), m, v, skip)
        _put(g, gradient, skip)
        for weight in (p, *master):
            _put(weight, new, skip)


def _correction(beta: float, steps: Tensor) -> Tensor:
    """``1 - beta^steps``, in float64: fp32 would cancel where ``beta`` is close to 1."""
    if not beta:
        return lazy.ones(())
    return fp32(1.0 - lazy.exp(lazy.cast(steps, lazy.float64) * math.log(beta)))


def _raise_unless(condition: Tensor, flag: Tensor) -> None:
    """Set ``flag`` to 1 unless ``condition``, a bool of one element."""
    flag.assign_(lazy.where(condition, flag, lazy.ones(flag.shape, flag.dtype)))


def _shape(x: Tensor) -> tuple[int, ...]:
    return x.shape
