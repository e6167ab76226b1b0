"""Optimizer kernels over lists of tensors."""

from __future__ import annotations

import math

import pytest
import torch
from tex_backends import Runner, on_backends
from torch import Tensor

from fusible.conformance.table import FLOATS, close, random
from fusible.errors import ArgumentError, ShapeError

pytestmark = on_backends("multi_tensor_adam", "multi_tensor_l2norm", "multi_tensor_scale")

SHAPES = ((5, 3), (7,), (0, 4), (1, 1))
RATES = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-4, "weight_decay": 0.2}


def lists(dtypes: tuple[torch.dtype, ...]) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    made = [[random(generator, shape, dtype) for shape in SHAPES] for dtype in dtypes]
    for tensors in made[3:4]:
        for tensor in tensors:
            tensor.abs_()
    return made


def adam(tensors: tuple[Tensor, ...], step: int, mode: int, correction: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(p, m, v)`` after one step, float64."""
    g, p, m, v, *master = (x.double() for x in tensors)
    p = master[0] if master else p
    bc1, bc2 = (1 - RATES["beta1"] ** step, 1 - RATES["beta2"] ** step) if correction else (1, 1)
    if mode == 0:
        g = g + RATES["weight_decay"] * p
    m = RATES["beta1"] * m + (1 - RATES["beta1"]) * g
    v = RATES["beta2"] * v + (1 - RATES["beta2"]) * g * g
    u = (m / bc1) / ((v / bc2).sqrt() + RATES["epsilon"])
    return p - RATES["lr"] * (u + (RATES["weight_decay"] * p if mode == 1 else 0)), m, v


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_adam(runner: Runner, master: bool, mode: int, correction: int, dtype: torch.dtype, moments: torch.dtype) -> None:
    tensors = lists((dtype, dtype, moments, moments, *((torch.float32,) if master else ())))
    expected = [adam(group, 3, mode, correction) for group in zip(*tensors, strict=True)]
    gradients = [g.clone() for g in tensors[0]]
    options = {"step": 3, "mode": mode, "bias_correction": correction, **RATES}
    assert runner("multi_tensor_adam", chunk_size=64, noop_flag=torch.ones(1, dtype=torch.int32), tensor_lists=tensors, **options) is None
    assert all(torch.equal(a, b) for a, b in zip(gradients, tensors[0], strict=True))
    for i, (p, m, v) in enumerate(expected):
        close(tensors[1][i], p, dtype, magnitude=40.0)
        close(tensors[2][i], m, moments, magnitude=8.0)
        close(tensors[3][i], v, moments, magnitude=8.0)
        if master:
            close(tensors[4][i], p, torch.float32, magnitude=40.0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("per_tensor", [None, False, True])
def test_l2norm(runner: Runner, dtype: torch.dtype, per_tensor: bool | None) -> None:
    (tensors,) = lists((dtype,))
    flag = torch.ones(1, dtype=torch.int32)
    norm, each = runner("multi_tensor_l2norm", chunk_size=64, noop_flag=flag, tensor_lists=[tensors], per_tensor_python=per_tensor)
    squares = torch.stack([(x.double() ** 2).sum() for x in tensors])
    assert norm.shape == (1,) and norm.dtype is each.dtype is torch.float32
    close(norm, squares.sum().sqrt()[None], torch.float32, 30)
    if per_tensor:
        close(each, squares.sqrt(), torch.float32, 15)
    else:
        assert each.shape == (0,)


@pytest.mark.parametrize("value", [math.inf, math.nan, 1.0])
def test_l2norm_flags_what_is_not_finite(runner: Runner, value: float) -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    runner("multi_tensor_l2norm", chunk_size=64, noop_flag=flag, tensor_lists=[[torch.ones(3), torch.tensor([value])]], per_tensor_python=False)
    assert flag.item() == (value != 1.0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_scale(runner: Runner, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    inputs, outputs = lists((dtype, out_dtype))
    flag = torch.ones(1, dtype=torch.int32)
    runner("multi_tensor_scale", chunk_size=64, noop_flag=flag, tensor_lists=[inputs, outputs], scale=0.3)
    for x, y in zip(inputs, outputs, strict=True):
        close(y, x.double() * 0.3, out_dtype)
    assert flag.item() == 1


@pytest.mark.parametrize(("value", "flagged"), [(math.inf, 1), (math.nan, 1), (1.0, 0), (6e4, 0)])
def test_scale_flags_inputs_that_are_not_finite_and_writes_all_the_same(runner: Runner, value: float, flagged: int) -> None:
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.float16)
    runner("multi_tensor_scale", chunk_size=64, noop_flag=flag, tensor_lists=[[torch.tensor([value, 1.0])], [out]], scale=4.0)
    assert flag.item() == flagged and out[1] == 4.0


def test_tensors_with_gaps_are_read_and_written_like_others(runner: Runner) -> None:
    made = [[x.abs() for x in lists((torch.float32,))[0][:1]] for _ in range(4)]
    apart = [[torch.zeros(3, 10)[:, ::2].t().copy_(x) for x in tensors] for tensors in made]
    options = {"step": 3, "mode": 1, "bias_correction": 1, **RATES}
    flag = torch.zeros(1, dtype=torch.int32)
    for tensors in (made, apart):
        runner("multi_tensor_adam", chunk_size=64, noop_flag=flag, tensor_lists=tensors, **options)
        runner("multi_tensor_scale", chunk_size=64, noop_flag=flag, tensor_lists=[tensors[1], tensors[0]], scale=3.0)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(made, apart, strict=True))
    for x in (made[1], apart[1]):
        norm, _ = runner("multi_tensor_l2norm", chunk_size=64, noop_flag=flag, tensor_lists=[x], per_tensor_python=False)
        close(norm, x[0].double().norm()[None], torch.float32, 15)


def test_wrong_lists_are_refused(runner: Runner) -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="2 lists"):
        runner("multi_tensor_scale", chunk_size=1, noop_flag=flag, tensor_lists=[[torch.ones(1)]], scale=1.0)
    with pytest.raises(ArgumentError, match="equal length"):
        runner("multi_tensor_scale", chunk_size=1, noop_flag=flag, tensor_lists=[[torch.ones(1)], []], scale=1.0)
    with pytest.raises(ShapeError, match="equal shapes"):
        runner("multi_tensor_scale", chunk_size=1, noop_flag=flag, tensor_lists=[[torch.ones(2)], [torch.ones(3)]], scale=1.0)
    tensors = [[torch.ones(2)] for _ in range(4)]
    with pytest.raises(ArgumentError, match="mode"):
        runner("multi_tensor_adam", chunk_size=1, noop_flag=flag, tensor_lists=tensors, step=1, mode=2, bias_correction=1, **RATES)
