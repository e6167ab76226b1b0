"""Optimizer kernels whose weights are split, 8-bit or held beside a master, whose numbers are on the device, and SGD; scales from amaxes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tex_backends import REFERENCE, Runner, on_backends
from torch import Tensor

from fusible.conformance.table import FLOATS, close, random
from fusible.errors import ArgumentError, DTypeError, ShapeError
from fusible.tex import DType
from fusible.tex.protocol import FLT_MAX, FP8_MAX

pytestmark = on_backends("multi_tensor_adam_param_remainder", "multi_tensor_adam_capturable", "multi_tensor_sgd", "multi_tensor_scale_tensor")

SHAPES = ((5, 3), (7,), (0, 4), ())
RATES = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-4, "weight_decay": 0.2}
FP32, BF16 = torch.float32, torch.bfloat16


def lists(*dtypes: torch.dtype) -> list[list[Tensor]]:
    """Gradients, parameters, first moments, second moments (not negative), and more."""
    generator = torch.Generator().manual_seed(6)
    made = [[random(generator, shape, dtype) for shape in SHAPES] for dtype in dtypes]
    return [[x.abs() for x in tensors] if i == 3 else tensors for i, tensors in enumerate(made)]


def copied(tensor_lists: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[x.clone() for x in tensors] for tensors in tensor_lists]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(x.dtype is y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def flag(value: int = 0) -> Tensor:
    return torch.full((1,), value, dtype=torch.int32)


def call(tensor_lists: list[list[Tensor]], noop: int = 0, **options: Any) -> dict[str, Any]:
    return {"chunk_size": 64, "noop_flag": flag(noop), "tensor_lists": tensor_lists, **options}


def adam_call(tensor_lists: list[list[Tensor]], mode: int, correction: int, step: int = 3, **options: Any) -> dict[str, Any]:
    return call(tensor_lists, **{"lr": 0.1, "step": step, "mode": mode, "bias_correction": correction, **RATES, **options})


MODES = pytest.mark.parametrize(("mode", "correction"), [(0, 0), (0, 1), (1, 0), (1, 1)])


@MODES
@pytest.mark.parametrize("gradient", FLOATS)
@pytest.mark.parametrize("moments", [FP32, BF16])
def test_high_and_low_words_are_the_master(runner: Runner, mode: int, correction: int, gradient: torch.dtype, moments: torch.dtype) -> None:
    g, p, m, v, master = lists(gradient, FP32, moments, moments, FP32)
    with_master = [g, [x.to(BF16) for x in p], m, v, master]
    high = [((x.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(BF16) for x in master]
    low = [x.view(torch.int32).to(torch.int16) for x in master]
    split = copied([g, high, m, v, low])
    for _ in range(3):
        assert runner("multi_tensor_adam_param_remainder", **adam_call(split, mode, correction)) is None
        REFERENCE("multi_tensor_adam", **adam_call(with_master, mode, correction))
        joined = [((p.view(torch.int16).int() << 16) + rest).view(FP32) for p, rest in zip(split[1], split[4], strict=True)]
        assert same(joined, with_master[4]) and same(split[2], with_master[2]) and same(split[3], with_master[3]) and same(split[0], g)
        for p, x in zip(split[1], with_master[4], strict=True):
            assert ((p.float() - x).abs() <= torch.finfo(BF16).eps / 2 * x.abs()).all()  # to the nearest


@MODES
@pytest.mark.parametrize("fp8", [DType.kFloat8E4M3, DType.kFloat8E5M2])
def test_fp8_weights_are_their_masters_cast(runner: Runner, mode: int, correction: int, fp8: DType) -> None:
    g, master, m, v = lists(BF16, FP32, FP32, FP32)
    plain = copied([g, master, m, v])
    data = [torch.full(x.shape, 99, dtype=torch.uint8) for x in master]
    scale, amax, inverse = ([torch.tensor([value]) for value in row] for row in ((1.0, 3e4, 2.0, 0.3), (0.0, 100.0, 1.5, 0.0), (9.0,) * 4))
    tensors = [g, data, m, v, master, scale, amax, inverse]
    assert runner("multi_tensor_adam_fp8", **adam_call(tensors, mode, correction, fp8_dtype=fp8)) is None
    REFERENCE("multi_tensor_adam", **adam_call(plain, mode, correction))
    assert same(plain[1], master) and same(plain[2], m) and same(plain[3], v)
    largest = [x.abs().amax().item() if x.numel() else 0.0 for x in master]
    assert [x.item() for x in amax] == [largest[0], 100.0, 1.5, largest[3]]
    assert same(inverse, [1 / x for x in scale])
    numpy = {DType.kFloat8E4M3: ml_dtypes.float8_e4m3fn, DType.kFloat8E5M2: ml_dtypes.float8_e5m2}[fp8]
    for x, s, bytes_ in zip(master, scale, data, strict=True):
        product = np.clip(x.numpy() * s.numpy(), -FP8_MAX[fp8], FP8_MAX[fp8]).reshape(x.shape)
        assert np.array_equal(bytes_.numpy(), product.astype(numpy).view(np.uint8))


def adam64(g: Tensor, p: Tensor, m: Tensor, v: Tensor, mode: int, correction: int, step: int, beta2: float) -> tuple[Tensor, Tensor, Tensor]:
    bc1, bc2 = (1 - RATES["beta1"] ** step, 1 - beta2**step) if correction else (1.0, 1.0)
    g = g + RATES["weight_decay"] * p if mode == 0 else g
    m, v = RATES["beta1"] * m + (1 - RATES["beta1"]) * g, beta2 * v + (1 - beta2) * g * g
    u = (m / bc1) / ((v / bc2).sqrt() + RATES["epsilon"]) + (RATES["weight_decay"] * p if mode == 1 else 0)
    return p - 0.1 * u, m, v


@MODES
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_numbers_on_the_device(runner: Runner, mode: int, correction: int, dtype: torch.dtype, master: bool, beta2: float) -> None:
    tensors = lists(dtype, dtype, FP32, FP32, *((FP32,) if master else ()))
    function = f"multi_tensor_adam_capturable{'_master' if master else ''}"
    options = {"lr": torch.tensor([0.1]), "step": torch.tensor([3], dtype=torch.int32), "inv_scale": torch.tensor([0.25]), "beta2": beta2}
    untouched = copied(tensors)
    runner(function, **adam_call(tensors, mode, correction, noop_flag=flag(1), **options))
    assert all(same(a, b) for a, b in zip(tensors, untouched, strict=True))
    assert runner(function, **adam_call(tensors, mode, correction, **options)) is None
    for i, (g, p, m, v, *masters) in enumerate(zip(*untouched, strict=True)):
        start = (masters[0] if masters else p).double()
        new, first, second = adam64(g.double() * 0.25, start, m.double(), v.double(), mode, correction, 3, beta2)
        close(tensors[0][i], g.double() * 0.25, dtype)
        # Of the update, 0.1 * 1 / epsilon is the most that an error of the moments is multiplied by.
        for got, expected, of, size in ((tensors[1], new, dtype, 40.0), (tensors[2], first, FP32, 8.0), (tensors[3], second, FP32, 8.0)):
            close(got[i], expected, of, magnitude=size)
        if masters:
            close(tensors[4][i], new, FP32, magnitude=40.0)
            assert torch.equal(tensors[4][i].to(dtype), tensors[1][i])


def test_the_first_step_is_the_rate_however_close_beta_is_to_1(runner: Runner) -> None:
    """From moments of zero, ``m / bc1 = g`` and ``v / bc2 = g^2``; ``1 - beta`` of fp32 numbers would be off by thousands of units."""
    g = random(torch.Generator().manual_seed(2), (64,), FP32)
    p, m, v = (torch.zeros(64) for _ in range(3))
    numbers = {"lr": torch.ones(1), "step": flag(1), "inv_scale": torch.ones(1), "beta2": 0.9999, "epsilon": 0.0, "weight_decay": 0.0}
    runner("multi_tensor_adam_capturable", **adam_call([[g], [p], [m], [v]], 1, 1, **numbers))
    assert ((p + g.sign()).abs() <= 8 * torch.finfo(FP32).eps).all()  # eight roundings
    numbers = {**numbers, "beta1": 0.0, "beta2": 0.0}
    runner("multi_tensor_adam_capturable", **adam_call([[g], [p.zero_()], [m], [v]], 1, 1, **numbers))
    assert ((p + g.sign()).abs() <= 8 * torch.finfo(FP32).eps).all()


@pytest.mark.parametrize(("mode", "optimizer"), [(0, torch.optim.Adam), (1, torch.optim.AdamW)])
def test_steps_are_those_of_torch(runner: Runner, mode: int, optimizer: Any) -> None:
    _, p, *_ = lists(FP32, FP32)
    theirs = [torch.nn.Parameter(x.double()) for x in p]
    reference = optimizer(theirs, lr=0.1, betas=(RATES["beta1"], RATES["beta2"]), eps=RATES["epsilon"], weight_decay=RATES["weight_decay"])
    moments = [[torch.zeros_like(x) for x in p] for _ in range(2)]
    step, generator = torch.zeros(1, dtype=torch.int32), torch.Generator().manual_seed(8)
    for _ in range(5):
        g = [random(generator, x.shape, FP32) for x in p]
        for x, gradient in zip(theirs, g, strict=True):
            x.grad = gradient.double()
        reference.step()
        step += 1
        numbers = {"lr": torch.tensor([0.1]), "step": step, "inv_scale": torch.ones(1)}
        runner("multi_tensor_adam_capturable", **adam_call([g, p, *moments], mode, 1, **numbers))
        for ours, other in zip(p, theirs, strict=True):
            close(ours, other.detach(), FP32, length=5 * 16, magnitude=8.0)


SGD = {"wd": 0.2, "momentum": 0.9, "dampening": 0.3, "lr": 0.1, "nesterov": False, "first_run": False, "wd_after_momentum": False, "scale": 0.25}


def sgd64(g: Tensor, p: Tensor, mom: Tensor, o: dict[str, Any]) -> tuple[Tensor, Tensor]:
    d = g * o["scale"] + (0 if o["wd_after_momentum"] else o["wd"] * p)
    if o["momentum"]:
        mom = d if o["first_run"] else o["momentum"] * mom + (1 - o["dampening"]) * d
        d = d + o["momentum"] * mom if o["nesterov"] else mom
    return p - o["lr"] * (d + (o["wd"] * p if o["wd_after_momentum"] else 0)), mom


@pytest.mark.parametrize("dtypes", [(FP32, FP32, FP32), (torch.float16,) * 3, (torch.float16, FP32, FP32, torch.float16), (BF16, FP32, FP32, BF16)])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd(runner: Runner, dtypes: tuple[torch.dtype, ...], momentum: float) -> None:
    for nesterov, first, after in itertools.product((False, True), repeat=3):
        options = {**SGD, "momentum": momentum, "nesterov": nesterov, "first_run": first, "wd_after_momentum": after}
        tensors = lists(*dtypes)
        untouched = copied(tensors)
        runner("multi_tensor_sgd", **call(tensors, noop=2, **options))
        assert all(same(a, b) for a, b in zip(tensors, untouched, strict=True))
        assert runner("multi_tensor_sgd", **call(tensors, **options)) is None
        assert same(tensors[0], untouched[0]) and (momentum or same(tensors[2], untouched[2]))
        for i, (g, p, mom, *_) in enumerate(zip(*untouched, strict=True)):
            new, moved = sgd64(g.double(), p.double(), mom.double(), options)
            close(tensors[1][i], new, dtypes[1], magnitude=8.0)
            close(tensors[2][i], moved, dtypes[2], magnitude=8.0)
            if len(dtypes) == 4:
                assert torch.equal(tensors[3][i], tensors[1][i].to(dtypes[3]))


@pytest.mark.parametrize(("momentum", "dampening", "nesterov"), [(0.0, 0.0, False), (0.9, 0.0, True), (0.9, 0.3, False)])
def test_sgd_steps_are_those_of_torch(runner: Runner, momentum: float, dampening: float, nesterov: bool) -> None:
    (_, p, mom) = lists(FP32, FP32, FP32)
    theirs = [torch.nn.Parameter(x.double()) for x in p]
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, dampening=dampening, weight_decay=0.2, nesterov=nesterov)
    options = {**SGD, "momentum": momentum, "dampening": dampening, "nesterov": nesterov, "scale": 1.0}
    generator = torch.Generator().manual_seed(9)
    for step in range(4):
        g = [random(generator, x.shape, FP32) for x in p]
        for x, gradient in zip(theirs, g, strict=True):
            x.grad = gradient.double()
        reference.step()
        runner("multi_tensor_sgd", **call([g, p, mom], **{**options, "first_run": step == 0}))
        for ours, other in zip(p, theirs, strict=True):
            close(ours, other.detach(), FP32, length=4 * 8, magnitude=8.0)


@pytest.mark.parametrize(("value", "flagged"), [(math.inf, 1), (math.nan, 1), (1.0, 0)])
def test_scale_and_norm_by_a_number_on_the_device(runner: Runner, value: float, flagged: int) -> None:
    inputs = [torch.tensor([value, 3.0]), torch.tensor(-2.0), torch.zeros(0)]
    kept, factor = copied([inputs])[0], torch.tensor([0.3])
    outputs, expected = ([torch.zeros(x.shape, dtype=BF16) for x in inputs] for _ in range(2))
    overflow, other = flag(), flag()
    arguments = {"chunk_size": 64, "is_infinite": overflow, "tensor_lists": [inputs, outputs], "scale": factor}
    assert runner("multi_tensor_scale_tensor", **arguments) is None
    REFERENCE("multi_tensor_scale", chunk_size=64, noop_flag=other, tensor_lists=[inputs, expected], scale=factor.item())
    assert overflow.item() == other.item() == flagged and all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(outputs, expected, strict=True)
    )

    for per_tensor in (None, False, True):
        overflow = flag()
        arguments = {"noop_flag": overflow, "tensor_lists": [inputs], "inv_scale": factor, "per_tensor_python": per_tensor}
        norm, each = runner("multi_tensor_unscale_l2norm", chunk_size=64, **arguments)
        squares = torch.stack([(x.double() * factor.double()).square().sum() for x in inputs])
        assert norm.shape == (1,) and norm.dtype is each.dtype is FP32 and overflow.item() == flagged
        close(norm, squares.sum().sqrt()[None], FP32, 3)
        assert each.shape == (3 if per_tensor else 0,)
        close(each, squares.sqrt() if per_tensor else each.double(), FP32, 2)
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(inputs, kept, strict=True))
    assert runner("multi_tensor_unscale_l2norm", **call([[]], inv_scale=factor, per_tensor_python=True))[0].tolist() == [0.0]


def test_a_norm_is_taken_after_unscaling(runner: Runner) -> None:
    """Numbers whose squares overflow have a norm where their quotients' do not."""
    norm, _ = runner("multi_tensor_unscale_l2norm", **call([[torch.full((4,), 3e38)]], inv_scale=torch.tensor([1e-38]), per_tensor_python=False))
    close(norm, torch.tensor([6.0]).double(), FP32, 4)


AMAX = torch.tensor([0.0, 1e-45, 1e-38, 1e-8, 0.3, 3.0, 448.0, 1e30, FLT_MAX, math.inf, math.nan, 5e-3])


@pytest.mark.parametrize("largest", [448.0, 57344.0])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
@pytest.mark.parametrize("power", [False, True])
def test_scales_from_amaxes(runner: Runner, largest: float, epsilon: float, power: bool) -> None:
    with np.errstate(all="ignore"):
        amax = np.where(AMAX.numpy() < np.float32(epsilon), np.float32(epsilon), AMAX.numpy())
        expected = np.minimum(np.float32(largest) / amax, np.float32(FLT_MAX))
        expected = np.exp2(np.floor(np.log2(expected, dtype=np.float64))).astype(np.float32) if power else expected
    expected = np.where(np.isfinite(amax) & (amax != 0), expected, np.float32(1))
    shapes = ((12,), (3, 4))
    tensors = [[AMAX.view(shape) for shape in shapes], *([torch.zeros(shape) for shape in shapes] for _ in range(2))]
    arguments = {"max_fp8": largest, "force_pow_2_scales": power, "epsilon": epsilon}
    assert runner("multi_tensor_compute_scale_and_scale_inv", **call(tensors, noop=1, **arguments)) is None
    for scale, inverse in zip(*tensors[1:], strict=True):
        assert np.array_equal(scale.numpy().reshape(-1), expected)
        assert np.array_equal(inverse.numpy().reshape(-1), np.float32(1) / expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_e8m0_scales_round_up(runner: Runner, dtype: torch.dtype) -> None:
    amax = torch.arange(0x7F81, dtype=torch.int32).to(torch.int16).view(dtype if dtype.itemsize == 2 else BF16).to(dtype)
    out = torch.zeros(amax.shape, dtype=torch.uint8)
    assert runner("multi_tensor_compute_scale_inv_e8m0", chunk_size=64, dummy=None, tensor_lists=[[amax], [out]]) is None
    product = amax.float().numpy() * (np.float32(1) / np.float32(448))
    mantissa, exponent = np.frexp(product.astype(np.float64))
    expected = np.clip(exponent - (mantissa == 0.5) + 127, 0, 254)
    expected = np.where(product == 0, 0, np.where(np.isinf(product), 254, np.where(np.isnan(product), 255, expected)))
    assert np.array_equal(out.numpy(), expected)


def apart(lists: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The same values in memory of their own."""
    return [[x.clone() for x in tensors] for tensors in lists]


def test_wrong_lists_are_refused(runner: Runner) -> None:
    x, half, byte, short = [torch.ones(2)], [torch.ones(2, dtype=BF16)], [torch.ones(2, dtype=torch.uint8)], [torch.ones(2, dtype=torch.int16)]
    one = [torch.ones(1)]
    with pytest.raises(DTypeError, match=r"tensor_lists\[1\] of multi_tensor_adam_param_remainder: expected torch.bfloat16"):
        runner("multi_tensor_adam_param_remainder", **adam_call(apart([x, x, x, x, short]), 0, 0))
    with pytest.raises(DTypeError, match=r"tensor_lists\[4\] .*: expected torch.int16"):
        runner("multi_tensor_adam_param_remainder", **adam_call(apart([x, half, x, x, x]), 0, 0))
    with pytest.raises(DTypeError, match=r"tensor_lists\[6\] .*: expected one number"):
        runner("multi_tensor_adam_fp8", **adam_call(apart([x, byte, x, x, x, one, x, one]), 0, 0, fp8_dtype=DType.kFloat8E4M3))
    with pytest.raises(DTypeError, match="fp8_dtype .*: expected .*kFloat8E5M2"):
        runner("multi_tensor_adam_fp8", **adam_call(apart([x, byte, x, x, x, one, one, one]), 0, 0, fp8_dtype=DType.kFloat32))
    with pytest.raises(ArgumentError, match="8 lists"):
        runner("multi_tensor_adam_fp8", **adam_call(apart([x, byte, x, x, x]), 0, 0, fp8_dtype=DType.kFloat8E4M3))
    with pytest.raises(ShapeError, match="equal shapes"):
        runner("multi_tensor_compute_scale_inv_e8m0", chunk_size=1, dummy=None, tensor_lists=[x, [byte[0][:1]]])
    numbers = {"lr": one[0], "step": flag(1), "inv_scale": one[0]}
    with pytest.raises(ArgumentError, match="mode"):
        runner("multi_tensor_adam_capturable", **adam_call(apart([x, x, x, x]), 2, 0, **numbers))
    with pytest.raises(ArgumentError, match="3 or 4 lists"):
        runner("multi_tensor_sgd", **call(apart([x, x]), **SGD))
    assert (x[0] == 1).all()
