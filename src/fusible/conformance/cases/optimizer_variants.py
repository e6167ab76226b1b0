"""Records of the optimizer steps in other forms, of SGD, and of what is scaled by a number on the device or read from amaxes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusible.conformance import block_oracle as oracle
from fusible.conformance.cases.optimizer import BOUND, RATES, STEP, call, flag, lists, norms, operands, step, stepped, stepping
from fusible.conformance.eight_bits import FORMATS, cast
from fusible.conformance.table import FLOATS, Arguments, Found, Output, Sample, record
from fusible.tex import DType
from fusible.tex.protocol import FLT_MAX, FP8_MAX

__all__ = []

_FP32, _BF16 = torch.float32, torch.bfloat16
_MODES = tuple(itertools.product((0, 1), repeat=2))


def untouched(tensors: list[list[Tensor]]) -> tuple[Output, ...]:
    return tuple(Output(f"tensor_lists.{place}.{i}", x.clone()) for place, each in enumerate(tensors) for i, x in enumerate(each))


def joined(i: int, remainders: int = 4) -> Found:
    """The fp32 number whose rounded high word is ``p`` and whose signed low word is the remainder. Every number has exactly one such pair."""

    def master(result: Any, arguments: Arguments) -> Tensor:
        p, rest = (arguments["tensor_lists"][place][i].cpu() for place in (1, remainders))
        assert p.dtype is _BF16 and rest.dtype is torch.int16
        return ((p.view(torch.int16).int() << 16) + rest).view(_FP32)

    return master


@record("multi_tensor_adam_param_remainder")
def adam_param_remainder(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for (mode, correction), moments in itertools.product(_MODES, (_FP32, _BF16)):
        g, master, m, v = operands(generator, dtype, _FP32, moments, moments)
        outputs = []
        for i, group in enumerate(zip(g, master, m, v, strict=True)):
            p, both = stepped(group, mode, correction, i, moments)
            outputs += [Output(joined(i), p, magnitude=BOUND), *both, Output(f"tensor_lists.0.{i}", group[0].clone())]
        bits = [x.view(torch.int32) for x in master]
        high = [((x + 0x8000) >> 16).to(torch.int16).view(_BF16) for x in bits]
        arguments = call([g, high, m, v, [x.to(torch.int16) for x in bits]], **stepping(mode, correction))
        yield Sample(f"mode {mode} correction {correction} moments {moments}", arguments, tuple(outputs), ("tensor_lists.1", "tensor_lists.4"))


def eight_bit(i: int, fp8: DType, scale: float, old: float) -> tuple[Output, ...]:
    """The outputs that follow bit for bit from the returned master weight."""

    def data(result: Any, arguments: Arguments) -> Tensor:
        return cast(arguments["tensor_lists"][4][i].cpu(), scale, fp8)

    def amax(result: Any, arguments: Arguments) -> Tensor:
        master = arguments["tensor_lists"][4][i].cpu().reshape(-1)
        return torch.cat([master.abs(), torch.tensor([old])]).max()[None]

    inverse = torch.tensor([scale]).double().reciprocal()
    return Output(f"tensor_lists.1.{i}", data), Output(f"tensor_lists.6.{i}", amax), Output(f"tensor_lists.7.{i}", inverse)


@record("multi_tensor_adam_fp8")
def adam_fp8(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    scales, amaxes = (1.0, 3e4, 2.0, 0.3), (0.0, 100.0, 1.5, 0.0)
    for (mode, correction), fp8 in itertools.product(_MODES, FORMATS):
        g, master, m, v = operands(generator, dtype, _FP32, _FP32, _FP32)
        outputs = []
        for i, group in enumerate(zip(g, master, m, v, strict=True)):
            p, both = stepped(group, mode, correction, i)
            outputs += [Output(f"tensor_lists.4.{i}", p, magnitude=BOUND), *both, *eight_bit(i, fp8, scales[i], amaxes[i])]
        data = [torch.full(x.shape, 99, dtype=torch.uint8) for x in master]
        numbers = [[torch.tensor([x]) for x in row] for row in (scales, amaxes, (9.0,) * 4)]
        arguments = call([g, data, m, v, master, *numbers], **stepping(mode, correction), fp8_dtype=fp8)
        yield Sample(f"mode {mode} correction {correction} {fp8.name}", arguments, tuple(outputs))


_HELD = (
    (torch.uint8, torch.float16, None),
    (torch.float16, torch.uint8, _FP32),
    (_BF16, torch.uint8, torch.int16),
    (torch.uint8, _FP32, torch.float16),
)
"""How the first moments, the second ones and the masters are held."""
_RANGES = {torch.uint8: FP8_MAX[DType.kFloat8E4M3], torch.float16: 65504 / 2}
_ROUNDINGS = {torch.uint8: (2.0**-4, 2.0**-10), torch.float16: (2.0**-11, 2.0**-25)}
"""What rounding a number to the format errs by: of a normal one in proportion, and at most of a subnormal one."""


def hold(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scale of numbers; an empty scale where there is none."""
    if dtype not in _RANGES:
        return x.to(dtype, copy=True), torch.zeros(0)
    scale = (x.abs().amax() if x.numel() else torch.zeros(())).float().reshape(1) / _RANGES[dtype] + 2.0**-126
    return cast(x, 1 / scale.item(), DType.kFloat8E4M3) if dtype is torch.uint8 else (x / scale).to(dtype), scale


def numbers_of(codes: Tensor, scale: Tensor) -> Tensor:
    """Float64."""
    codes, scale = codes.cpu(), scale.cpu()
    wide = codes.view(torch.float8_e4m3fn).double() if codes.dtype is torch.uint8 else codes.double()
    return wide * scale.double() if scale.numel() else wide


def held(place: int, scales: int, i: int, expected: Tensor, dtype: torch.dtype, size: float) -> tuple[Output, ...]:
    """That a state is ``expected``, float64, but for its own rounding and that of fp32, and its scale what belongs to its largest number."""
    if dtype not in _RANGES:
        return (Output(f"tensor_lists.{place}.{i}", expected, dtype, magnitude=size),)
    largest = expected.abs().amax().item() if expected.numel() else 0.0
    scale = max(largest / _RANGES[dtype], 2.0**-126)
    own, least = _ROUNDINGS[dtype]
    slack = 16 * torch.finfo(_FP32).eps * size
    bound = torch.maximum(own * expected.abs(), torch.tensor(least * scale, dtype=torch.float64)) * 1.001 + slack

    def near(result: Any, arguments: Arguments) -> bool:
        got = numbers_of(arguments["tensor_lists"][place][i], arguments["tensor_lists"][scales][i])
        return bool(((got - expected).abs() <= bound).all())

    return Output(near, True), Output(f"tensor_lists.{scales}.{i}", torch.tensor([scale]).double(), magnitude=scale + size / _RANGES[dtype], length=4)


@record("multi_tensor_adam_scaled")
def adam_scaled(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for (mode, correction), (first, second, master) in zip(_MODES, _HELD, strict=True):
        g, p, m, v = operands(generator, dtype, _FP32, _FP32, _FP32)
        (ms, m_scales), (vs, v_scales) = (
            [list(x) for x in zip(*(hold(each, kind) for each in of), strict=True)] for of, kind in ((m, first), (v, second))
        )
        masters, parameters = [], [x.to(dtype, copy=True) for x in p]
        if master is torch.int16:
            bits = [x.view(torch.int32) for x in p]
            parameters = [((x + 0x8000) >> 16).to(torch.int16).view(_BF16) for x in bits]
            masters = [[x.to(torch.int16) for x in bits], [torch.zeros(0) for _ in bits]]
        elif master is not None:
            masters = [list(x) for x in zip(*(hold(each, master) for each in p), strict=True)]
        starts = p if master is torch.int16 else [numbers_of(*x) for x in zip(*masters, strict=True)] if masters else parameters
        outputs = []
        for i, (start, *old) in enumerate(zip(starts, ms, m_scales, vs, v_scales, strict=True)):
            new, moved, squared = step((g[i], start, numbers_of(*old[:2]), numbers_of(*old[2:])), mode, correction)
            outputs += [*held(2, 4, i, moved, first, 8.0), *held(3, 5, i, squared, second, 8.0), Output(f"tensor_lists.0.{i}", g[i].clone())]
            if master is torch.int16:
                outputs.append(Output(joined(i, 6), new, magnitude=BOUND))
            else:
                outputs += [Output(f"tensor_lists.1.{i}", new, dtype, magnitude=BOUND), *(held(6, 7, i, new, master, BOUND) if master else ())]
        arguments = call([g, parameters, ms, vs, m_scales, v_scales, *masters], **stepping(mode, correction))
        written = tuple(f"tensor_lists.{place}" for place in range(1, len(arguments["tensor_lists"])))
        yield Sample(f"mode {mode} correction {correction} {first} {second} {master}", arguments, tuple(outputs), written)


def rounded(place: int, i: int, dtype: torch.dtype) -> Found:
    """The ``i``th tensor of the list at ``place`` after the call, rounded."""
    return lambda result, arguments: arguments["tensor_lists"][place][i].cpu().to(dtype)


def capturable(generator: torch.Generator, dtype: torch.dtype, masters: bool) -> Iterator[Sample]:
    for (mode, correction), noop in itertools.product(_MODES, (0, 1)):
        moments = _BF16 if mode > correction else _FP32
        tensors = operands(generator, dtype, dtype, moments, moments, *((_FP32,) if masters else ()))
        outputs = [*untouched(tensors)] if noop else []
        for i, (g, *rest) in enumerate(() if noop else zip(*tensors, strict=True)):
            p, both = stepped((g.double() * 0.25, *rest), mode, correction, i, moments)
            outputs += [Output(f"tensor_lists.0.{i}", g.double() * 0.25, dtype), *both, Output(f"tensor_lists.1.{i}", p, dtype, magnitude=BOUND)]
            if masters:
                outputs += [Output(f"tensor_lists.4.{i}", p, magnitude=BOUND), Output(f"tensor_lists.1.{i}", rounded(4, i, dtype))]
        on_device = {"lr": torch.tensor([RATES[mode]["lr"]]), "step": flag(STEP[mode]), "inv_scale": torch.tensor([0.25])}
        arguments = call(tensors, noop, **{**stepping(mode, correction), **on_device})
        yield Sample(f"mode {mode} correction {correction} noop {noop}", arguments, tuple(outputs))


@record("multi_tensor_adam_capturable")
def adam_capturable(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    yield from capturable(generator, dtype, False)
    # From moments of zero, m / bc1 = g and v / bc2 = g^2, so the step is the rate, however close beta is to 1; eight roundings. Nothing is planted:
    # without an epsilon, what comes of a gradient whose square is 0 hangs on whether the hardware has subnormal numbers.
    g, p = torch.randn(64, generator=generator).to(dtype), torch.zeros(64, dtype=dtype)
    numbers = {"lr": torch.ones(1), "step": flag(1), "inv_scale": torch.ones(1), "mode": 1, "bias_correction": 1}
    rates: dict[str, Any] = {"beta1": 0.9, "beta2": 0.9999, "epsilon": 0.0, "weight_decay": 0.0}
    arguments = call([[g], [p], [torch.zeros(64)], [torch.zeros(64)]], **numbers, **rates)
    moments = Output("tensor_lists.2.0", 0.1 * g.double()), Output("tensor_lists.3.0", 1e-4 * g.double().square())
    yield Sample("the first step", arguments, (Output("tensor_lists.1.0", -g.double().sign(), dtype, magnitude=0.5), *moments))


@record("multi_tensor_adam_capturable_master")
def adam_capturable_master(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    yield from capturable(generator, dtype, True)


_SGD = {False: {"wd": 0.2, "dampening": 0.3, "lr": 0.1, "scale": 0.25}, True: {"wd": 0.1, "dampening": 0.6, "lr": 0.05, "scale": 0.5}}
"""By whether Nesterov's momentum is used, so that no option has the same value in every sample."""


def descended(g: Tensor, p: Tensor, momentum: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """``(p, mom)`` after a step, float64."""
    decay = options["wd"] * p
    d = g * options["scale"] + (0 if options["wd_after_momentum"] else decay)
    if rate := options["momentum"]:
        momentum = d if options["first_run"] else rate * momentum + (1 - options["dampening"]) * d
        d = d + rate * momentum if options["nesterov"] else momentum
    return p - options["lr"] * (d + (decay if options["wd_after_momentum"] else 0)), momentum


@record("multi_tensor_sgd")
def sgd(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for dtypes in ((dtype,) * 3, (dtype, _FP32, _FP32, dtype))[: 1 if dtype is _FP32 else 2]:
        for nesterov, first, after in itertools.product((False, True), repeat=3):
            for momentum, noop in ((0.9, 0), (0.0, 0), (0.9, 2)):
                options = {**_SGD[nesterov], "momentum": momentum, "nesterov": nesterov, "first_run": first, "wd_after_momentum": after}
                tensors = lists(generator, *dtypes)
                kept = untouched(tensors)
                count = len(tensors[0])
                outputs = [*kept] if noop else [*kept[:count], *(() if momentum else kept[2 * count : 3 * count])]
                for i, (g, p, mom, *copies) in enumerate(() if noop else zip(*tensors, strict=True)):
                    new, moved = descended(g.double(), p.double(), mom.double(), options)
                    outputs.append(Output(f"tensor_lists.1.{i}", new, dtypes[1], magnitude=8.0))
                    outputs += [Output(f"tensor_lists.2.{i}", moved, dtypes[2], magnitude=8.0)] if momentum else []
                    outputs += [Output(f"tensor_lists.3.{i}", rounded(1, i, dtype)) for _ in copies]
                label = f"{len(dtypes)} lists, momentum {momentum} nesterov {nesterov} first {first} after {after} noop {noop}"
                yield Sample(label, call(tensors, noop, **options), tuple(outputs))


@record("multi_tensor_scale_tensor")
def scale_tensor(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    factor = torch.tensor([0.3])
    for out, value in itertools.product(FLOATS, (1.0, math.inf, math.nan)):
        inputs, outputs = lists(generator, dtype, out)
        inputs[1][2] = value
        wanted = [Output(f"tensor_lists.1.{i}", x.double() * factor.double(), out) for i, x in enumerate(inputs)]
        arguments = {"chunk_size": 64, "is_infinite": flag(), "tensor_lists": [inputs, outputs], "scale": factor.clone()}
        yield Sample(f"to {out}, {value}", arguments, (*wanted, Output("is_infinite", flag(not math.isfinite(value)))))


@record("multi_tensor_unscale_l2norm")
def unscale_l2norm(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    factor = torch.tensor([0.3])
    for each, value in itertools.product((None, False, True), (1.0, math.inf, math.nan)):
        (tensors,) = lists(generator, dtype)
        tensors[1][2] = value
        arguments = call([tensors], inv_scale=factor.clone(), per_tensor_python=each)
        outputs = norms([x.double() * factor.double() for x in tensors], each)
        yield Sample(f"each {each}, {value}", arguments, (*outputs, Output("noop_flag", flag(not math.isfinite(value)))))
    # The squares overflow in the dtype before unscaling, but not after it.
    large = torch.full((4,), 3e38 if dtype.itemsize == 4 or dtype is _BF16 else 6e4).to(dtype)
    small = torch.tensor([1e-36 if dtype is not torch.float16 else 1e-4])
    norm = (large.double() * small.double()).square().sum().sqrt()[None]
    yield Sample("large", call([[large]], inv_scale=small, per_tensor_python=False), (Output(0, norm, length=4), Output("noop_flag", flag())))


@record("multi_tensor_compute_scale_and_scale_inv", dtypes=(_FP32,))
def scale_and_scale_inv(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    usual = torch.tensor([0.0, 1e-30, 1e-8, 0.3, 3.0, 448.0, 1e30, 5e-3, FLT_MAX, math.inf, math.nan, 7.0])
    for amax, fp8, power, epsilon in itertools.product((usual, torch.tensor([1.5e-38])), FORMATS, (False, True), (0.0, 1e-3)):
        scale = oracle.fp8_scale(amax.numpy(), fp8, epsilon, power, FLT_MAX)
        inverse = np.float32(1) / scale
        # The reciprocal of FLT_MAX is subnormal, which a device may flush to 0.
        wanted = torch.from_numpy(inverse if inverse.min() > 2e-38 else inverse.astype(np.float64))
        shapes = (amax.shape, (amax.numel() // 2, 2) if amax.numel() > 1 else (1, 1))
        tensors = [[amax.view(shape).clone() for shape in shapes], *([torch.zeros(shape) for shape in shapes] for _ in range(2))]
        outputs = [Output(f"tensor_lists.1.{i}", torch.from_numpy(scale).view(shape)) for i, shape in enumerate(shapes)]
        outputs += [Output(f"tensor_lists.2.{i}", wanted.view(shape)) for i, shape in enumerate(shapes)]
        arguments = call(tensors, 1, max_fp8=FP8_MAX[fp8], force_pow_2_scales=power, epsilon=epsilon)
        yield Sample(f"{amax.numel()} to {FP8_MAX[fp8]} power {power} epsilon {epsilon}", arguments, tuple(outputs))


@record("multi_tensor_compute_scale_inv_e8m0")
def scale_inv_e8m0(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Zero, NaN, and every 16-bit number that is normal in fp32 when divided by 448."""
    patterns = torch.arange(0x7F81, dtype=torch.int32).to(torch.int16).view(_BF16 if dtype is _FP32 else dtype).to(dtype)
    least = 448 * 2.0**-127  # divided by 448, the least number that E8M0 has
    amax = torch.cat([patterns[~(patterns.float().abs() < 5.5e-36) | (patterns == 0)], torch.tensor([math.nan, least], dtype=dtype)])
    codes = torch.from_numpy(oracle.exponent_bytes(amax.float().numpy() * (np.float32(1) / np.float32(448))))
    lengths = [1000, amax.numel() - 1000]
    tensors = [[x.clone() for x in amax.split(lengths)], [torch.zeros(n, dtype=torch.uint8) for n in lengths]]
    outputs = tuple(Output(f"tensor_lists.1.{i}", x.clone()) for i, x in enumerate(codes.split(lengths)))
    yield Sample("every one", {"chunk_size": 64, "dummy": None, "tensor_lists": tensors}, outputs)
