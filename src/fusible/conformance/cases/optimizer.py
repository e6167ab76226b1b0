"""Records of the kernels over lists of tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fusible.conformance.table import FLOATS, Output, Sample, random, record

__all__ = []

_SHAPES = ((5, 3), (4103,), (0, 4), (1, 1))
_RATES = {
    0: {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-4, "weight_decay": 0.2},
    1: {"lr": 0.05, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "weight_decay": 0.1},
}
"""By mode, so that none of them is the same in every sample."""
_STEP = {0: 3, 1: 5}
"""By mode too."""


def lists(generator: torch.Generator, *dtypes: torch.dtype) -> list[list[Tensor]]:
    return [[random(generator, shape, dtype) for shape in _SHAPES] for dtype in dtypes]


def flag(value: int = 0) -> Tensor:
    return torch.tensor([value], dtype=torch.int32)


@record("multi_tensor_scale")
def scale(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for out in FLOATS:
        inputs, outputs = lists(generator, dtype, out)
        wanted = [Output(f"tensor_lists.1.{i}", x.double() * 0.3, out) for i, x in enumerate(inputs)]
        arguments = {"chunk_size": 64, "noop_flag": flag(), "tensor_lists": [inputs, outputs], "scale": 0.3}
        yield Sample(f"to {out}", arguments, (*wanted, Output("noop_flag", flag())))
    lost = torch.tensor([1.0, torch.inf]).to(dtype)
    arguments = {"chunk_size": 64, "noop_flag": flag(), "tensor_lists": [[lost], [torch.zeros(2, dtype=dtype)]], "scale": 2.0}
    yield Sample("infinite", arguments, (Output("noop_flag", flag(1)), Output("tensor_lists.1.0", lost.double() * 2, dtype)))


@record("multi_tensor_l2norm")
def l2norm(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for each in (False, True):
        (tensors,) = lists(generator, dtype)
        squares = torch.stack([(x.double() ** 2).sum() for x in tensors])
        apart = squares.sqrt() if each else torch.zeros(0, dtype=torch.float64)
        arguments = {"chunk_size": 64, "noop_flag": flag(), "tensor_lists": [tensors], "per_tensor_python": each}
        outputs = (Output(0, squares.sum().sqrt()[None], length=4200), Output(1, apart, length=4200), Output("noop_flag", flag()))
        yield Sample(f"each {each}", arguments, outputs)


def step(tensors: tuple[Tensor, ...], mode: int, correction: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(p, m, v)`` after a step of Adam, float64."""
    g, p, m, v, *master = (x.double() for x in tensors)
    p = master[0] if master else p
    lr, beta1, beta2, epsilon, weight_decay = _RATES[mode].values()
    bc1, bc2 = (1 - beta1 ** _STEP[mode], 1 - beta2 ** _STEP[mode]) if correction else (1, 1)
    g = g + weight_decay * p if mode == 0 else g
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    u = (m / bc1) / ((v / bc2).sqrt() + epsilon) + (weight_decay * p if mode == 1 else 0)
    return p - lr * u, m, v


@record("multi_tensor_adam")
def adam(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for mode, correction, moments, master in ((0, 1, torch.float32, False), (1, 0, torch.float32, True), (1, 1, torch.bfloat16, False)):
        tensors = lists(generator, dtype, dtype, moments, moments, *((torch.float32,) if master else ()))
        tensors[3] = [v.abs() for v in tensors[3]]
        outputs = []
        for i, group in enumerate(zip(*tensors, strict=True)):
            p, m, v = step(group, mode, correction)
            # A quotient by a root that may be as small as epsilon: the tests' bound of the steps made here.
            outputs.append(Output(f"tensor_lists.1.{i}", p, dtype, magnitude=40.0))
            outputs += [Output(f"tensor_lists.{place}.{i}", moment, moments, magnitude=8.0) for place, moment in ((2, m), (3, v))]
            outputs += [Output(f"tensor_lists.4.{i}", p, magnitude=40.0)] if master else []
            outputs.append(Output(f"tensor_lists.0.{i}", group[0].clone()))
        options = {"step": _STEP[mode], "mode": mode, "bias_correction": correction, **_RATES[mode]}
        arguments = {"chunk_size": 64, "noop_flag": flag(1), "tensor_lists": tensors, **options}
        yield Sample(f"mode {mode} correction {correction} moments {moments} master {master}", arguments, tuple(outputs))
