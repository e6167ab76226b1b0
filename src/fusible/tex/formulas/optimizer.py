"""Optimizer kernels over lists of tensors: fp32 arithmetic, one rounding at each store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from fusible.tex.calls.optimizer import FP16_RANGE, LEAST_SCALE, AdamRule, check_float_lists, check_held_lists, check_typed_lists
from fusible.tex.enums import DType
from fusible.tex.formulas.arrays import Array, ArrayKernels, Function
from fusible.tex.formulas.block_fp8 import BlockFp8
from fusible.tex.formulas.quantize import Quantizing
from fusible.tex.interface.declare import CallArguments, by_name
from fusible.tex.interface.optimizer import Optimizer
from fusible.tex.protocol import FLT_MAX, FP8_MAX, INT16, fp8_format

__all__ = ["OptimizerFormulas"]

_Lists = Sequence[Sequence[Any]]


class OptimizerFormulas(ArrayKernels, Optimizer):
    """A backend has the norms, a correction of Adam's, and the way in which all that a step changes is written."""

    _quantizing: ClassVar[Quantizing]
    _blocks: ClassVar[BlockFp8]
    _floats: ClassVar[tuple[Any, Any, Any]]
    """The backend's fp32, bf16 and fp16."""
    _bytes: ClassVar[tuple[Any, ...]]
    """What an FP8 copy of a weight may be of."""
    _exponents: ClassVar[tuple[Any, ...]]
    """What E8M0 scales may be of."""
    _alike: ClassVar[Function]
    """``(x)``: what tensors that belong together agree in."""

    def _norms(self, tensors: Iterable[Any]) -> tuple[Any, Any]:
        """The L2 norm of all tensors, ``[1]``, and that of each."""
        raise NotImplementedError

    def _less_power(self, beta: float, steps: Array) -> Any:
        """``1 - beta^steps`` for ``beta > 0``, without the cancellation of fp32 where that is close to 1."""
        raise NotImplementedError

    def _write_together(self, old: Sequence[Any], new: Sequence[Any], skip: Array | None = None) -> None:
        """Round each of ``new`` into its tensor of ``old``, except where ``skip`` (one flag)."""
        raise NotImplementedError

    def multi_tensor_scale(self, chunk_size: int, noop_flag: Array, tensor_lists: _Lists, scale: float) -> None:
        self._check_floats(tensor_lists, (2,), "multi_tensor_scale")
        self._scale_lists(noop_flag, tensor_lists, scale)

    def multi_tensor_scale_tensor(self, chunk_size: int, is_infinite: Array, tensor_lists: _Lists, scale: Array | float) -> None:
        self._check_floats(tensor_lists, (2,), "multi_tensor_scale_tensor")
        self._scale_lists(is_infinite, tensor_lists, self._arrays.reshape(scale, ()))

    def multi_tensor_l2norm(self, chunk_size: int, noop_flag: Array, tensor_lists: _Lists, per_tensor_python: bool | None) -> tuple[Any, Any]:
        self._check_floats(tensor_lists, (1,), "multi_tensor_l2norm")
        return self._checked_norms(noop_flag, len(tensor_lists[0]), tensor_lists[0], per_tensor_python)

    def multi_tensor_unscale_l2norm(
        self, chunk_size: int, noop_flag: Array, tensor_lists: _Lists, inv_scale: Array, per_tensor_python: bool | None
    ) -> tuple[Any, Any]:
        self._check_floats(tensor_lists, (1,), "multi_tensor_unscale_l2norm")
        xp, (tensors,) = self._arrays, tensor_lists
        return self._checked_norms(noop_flag, len(tensors), (xp.wide(x) * xp.reshape(inv_scale, ()) for x in tensors), per_tensor_python)

    @by_name
    def multi_tensor_adam(self, call: CallArguments) -> None:
        self._check_floats(call.tensor_lists, (4, 5), "multi_tensor_adam")
        xp, rule = self._arrays, AdamRule.of(call)
        for g, p, m, v, *master in zip(*call.tensor_lists, strict=True):
            new, *moments = self._adam_step(rule, xp.wide(g), xp.wide(master[0] if master else p), m, v)
            self._write_together((m, v, p, *master), (*moments, new, *[new] * len(master)))

    @by_name
    def multi_tensor_adam_param_remainder(self, call: CallArguments) -> None:
        xp, (_, bf16, _), rule = self._arrays, self._floats, AdamRule.of(call)
        types = self._floats, (bf16,), self._floats, self._floats, (xp.dtype(INT16),)
        check_typed_lists(call.tensor_lists, types, "multi_tensor_adam_param_remainder")
        for g, p, m, v, remainder in zip(*call.tensor_lists, strict=True):
            value, *moments = self._adam_step(rule, xp.wide(g), self._joined(p, remainder), m, v)
            self._write_together((m, v, p, remainder), (*moments, *self._split(value)))

    @by_name
    def multi_tensor_adam_fp8(self, call: CallArguments) -> None:
        xp, to, fp8, floats, fp32 = self._arrays, self._quantizing, fp8_format(call.fp8_dtype), self._floats, self._floats[:1]
        check_typed_lists(call.tensor_lists, (floats, self._bytes, floats, floats, *[fp32] * 4), "multi_tensor_adam_fp8", single=3)
        rule = AdamRule.of(call)
        for g, p, m, v, master, scale, amax, scale_inv in zip(*call.tensor_lists, strict=True):
            new, *moments = self._adam_step(rule, xp.wide(g), master, m, v)
            numbers = xp.maximum(amax, xp.reshape(xp.fp8.tensor_amax(new), amax.shape)), xp.reshape(to.reciprocal(scale), scale_inv.shape)
            data = xp.bitcast(to.encode(new, xp.reshape(scale, ()), fp8), p.dtype)
            self._write_together((m, v, master, amax, scale_inv, p), (*moments, new, *numbers, data))

    @by_name
    def multi_tensor_adam_scaled(self, call: CallArguments) -> None:
        xp, rule = self._arrays, AdamRule.of(call)
        check_held_lists(call.tensor_lists, "multi_tensor_adam_scaled", self._floats, self._bytes[:1], xp.dtype(INT16))
        for g, p, m, v, m_scale, v_scale, *master in zip(*call.tensor_lists, strict=True):
            states = [(m, m_scale), (v, v_scale)]
            split = bool(master) and master[0].dtype == xp.dtype(INT16)
            start = self._joined(p, master[0]) if split else self._held_values(*master) if master else xp.wide(p)
            new, *moments = self._adam_step(rule, xp.wide(g), start, *(self._held_values(*state) for state in states))
            old, values = [p, master[0]] if split else [p], [*self._split(new)] if split else [new]
            if master and not split:
                states, moments = [*states, (master[0], master[1])], [*moments, new]
            for (held, scale), value in zip(states, moments, strict=True):
                codes, *numbers = self._held_codes(value, held, scale)
                old += [held, scale][: 1 + len(numbers)]
                values += [codes, *numbers]
            self._write_together(old, values)

    @by_name
    def multi_tensor_adam_capturable(self, call: CallArguments) -> None:
        self._check_floats(call.tensor_lists, (4,), "multi_tensor_adam_capturable")
        self._adam_of_tensors(call)

    @by_name
    def multi_tensor_adam_capturable_master(self, call: CallArguments) -> None:
        check_typed_lists(call.tensor_lists, (*[self._floats] * 4, self._floats[:1]), "multi_tensor_adam_capturable_master")
        self._adam_of_tensors(call)

    @by_name
    def multi_tensor_sgd(self, call: CallArguments) -> None:
        self._check_floats(call.tensor_lists, (3, 4), "multi_tensor_sgd")
        xp = self._arrays
        skip = xp.reshape(call.noop_flag, ()) != 0
        for g, p, mom, *copies in zip(*call.tensor_lists, strict=True):
            value, update = xp.wide(p), xp.wide(g) * call.scale
            if call.wd and not call.wd_after_momentum:
                update = xp.plus_scaled(update, value, call.wd)
            old, new = [p, *copies], []
            if call.momentum:
                moved = update if call.first_run else xp.plus_scaled(xp.wide(mom) * call.momentum, update, 1 - call.dampening)
                old, new = [mom, *old], [moved]
                update = xp.plus_scaled(update, moved, call.momentum) if call.nesterov else moved
            if call.wd and call.wd_after_momentum:
                update = xp.plus_scaled(update, value, call.wd)
            self._write_together(old, [*new, *[xp.minus_scaled(value, update, call.lr)] * (1 + len(copies))], skip)

    @by_name
    def multi_tensor_compute_scale_and_scale_inv(self, call: CallArguments) -> None:
        xp = self._arrays
        check_typed_lists(call.tensor_lists, [self._floats[:1]] * 3, "multi_tensor_compute_scale_and_scale_inv")
        for amax, scale, scale_inv in zip(*call.tensor_lists, strict=True):
            found = self._blocks.scale_of_amax(amax, call.max_fp8, call.epsilon, call.force_pow_2_scales, FLT_MAX)
            xp.put(scale, xp.reshape(found, scale.shape))
            xp.put(scale_inv, xp.reshape(self._quantizing.reciprocal(scale), scale_inv.shape))

    def multi_tensor_compute_scale_inv_e8m0(self, chunk_size: int, dummy: Any, tensor_lists: _Lists) -> None:
        xp = self._arrays
        check_typed_lists(tensor_lists, (self._floats, self._exponents), "multi_tensor_compute_scale_inv_e8m0")
        for amax, out in zip(*tensor_lists, strict=True):
            # A product, as in the MXFP8 cast: the quotient would be rounded otherwise.
            found = self._blocks.exponent(xp.copy(xp.wide(amax)), 1 / FP8_MAX[DType.kFloat8E4M3])
            xp.put(out, xp.bitcast(xp.reshape(found, out.shape), out.dtype))

    def _check_floats(self, tensor_lists: _Lists, counts: tuple[int, ...], function: str) -> None:
        check_float_lists(tensor_lists, counts, function, self._alike, self._floats)

    def _scale_lists(self, flag: Array, tensor_lists: _Lists, scale: Array | float) -> None:
        xp = self._arrays
        for x, out in zip(*tensor_lists, strict=True):
            finite = xp.all_finite(x)
            xp.put(out, xp.wide(x) * scale)
            xp.set_unless(flag, finite)

    def _checked_norms(self, flag: Array, count: int, tensors: Iterable[Any], each: bool | None) -> tuple[Any, Any]:
        xp = self._arrays
        empty = xp.full((0,), 0.0, xp.float32, flag)
        if not count:
            return xp.full((1,), 0.0, xp.float32, flag), empty
        norm, norms = self._norms(tensors)
        xp.set_unless(flag, xp.all_finite(norm))
        return norm, norms if each else empty

    def _adam_step(self, rule: AdamRule, gradient: Array, value: Array, m: Array, v: Array) -> tuple[Any, Any, Any]:
        """The new value of a parameter and its new moments, all fp32."""
        xp = self._arrays
        if rule.l2:
            gradient = xp.plus_scaled(gradient, value, rule.l2)
        first = xp.plus_scaled(xp.wide(m) * rule.beta1, gradient, 1 - rule.beta1)
        second = xp.plus_scaled_square(xp.wide(v) * rule.beta2, gradient, 1 - rule.beta2)
        update = xp.over(first / rule.correction1, xp.plus(xp.sqrt(second / rule.correction2), rule.epsilon))
        if rule.decoupled:
            update = xp.plus_scaled(update, value, rule.decoupled)
        return xp.minus_scaled(value, update, rule.lr), first, second

    def _joined(self, p: Array, remainder: Array) -> Any:
        """The fp32 numbers of which ``p``, bf16, has the upper words, and the int16 ``remainder`` the lower ones, signed."""
        xp = self._arrays
        int16, int32 = xp.dtype(INT16), xp.dtype(DType.kInt32)
        return xp.bitcast((xp.cast(xp.bitcast(p, int16), int32) << 16) + xp.cast(xp.reshape(remainder, p.shape), int32), self._floats[0])

    def _split(self, value: Array) -> tuple[Any, Any]:
        """``p`` and ``remainder``, of which ``value`` consists."""
        xp = self._arrays
        int16, int32 = xp.dtype(INT16), xp.dtype(DType.kInt32)
        new = xp.bitcast(value, int32)
        low = xp.cast(new, int16)  # signed
        return xp.bitcast(xp.cast(xp.shift_right(new - xp.cast(low, int32), 16), int16), self._floats[1]), low

    def _held_values(self, held: Array, scale: Array) -> Any:
        """The numbers of a state that is held in few bits."""
        xp = self._arrays
        if held.dtype in self._bytes:
            return xp.times(xp.fp8.decode(held, DType.kFloat8E4M3), xp.reshape(scale, ()))
        return xp.wide(held) * xp.reshape(scale, ()) if held.dtype == self._floats[2] else xp.wide(held)

    def _held_codes(self, values: Array, held: Array, scale: Array) -> tuple[Any, ...]:
        """What holds new numbers as ``held`` does its own: codes, and their scale where they have one."""
        xp, to = self._arrays, self._quantizing
        coded = held.dtype in self._bytes
        if not coded and held.dtype != self._floats[2]:
            return (values,)
        least = xp.full((1,), LEAST_SCALE, xp.float32, scale)
        own = xp.maximum(xp.fp8.tensor_amax(values) / (FP8_MAX[DType.kFloat8E4M3] if coded else FP16_RANGE), least)
        inverse = to.reciprocal(own)
        if coded:
            return to.encode(values, xp.reshape(inverse, ()), DType.kFloat8E4M3), xp.reshape(to.reciprocal(inverse), scale.shape)
        return values * xp.reshape(inverse, ()), xp.reshape(own, scale.shape)

    def _adam_of_tensors(self, call: CallArguments) -> None:
        """A step whose rate, count and gradient scale are tensors, none of which is read back."""
        xp = self._arrays
        rate, steps, skip, factor = (xp.reshape(x, ()) for x in (call.lr, call.step, call.noop_flag, call.inv_scale))
        corrected = [self._less_power(beta, steps) if beta and call.bias_correction else 1.0 for beta in (call.beta1, call.beta2)]
        rule, skip = AdamRule.of(call, xp.wide(rate), (corrected[0], corrected[1])), skip == 1
        for g, p, m, v, *master in zip(*call.tensor_lists, strict=True):
            gradient = xp.wide(g) * xp.wide(factor)
            new, *moments = self._adam_step(rule, gradient, xp.wide(master[0] if master else p), m, v)
            self._write_together((m, v, g, p, *master), (*moments, gradient, new, *[new] * len(master)), skip)
