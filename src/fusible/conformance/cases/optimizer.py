"""Records of the kernels over lists of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.table import FLOATS, Output, Sample, random, record

__all__ = ["BOUND", "RATES", "STEP", "call", "flag", "lists", "norms", "operands", "step", "stepped", "stepping"]

_SHAPES = ((5, 3), (4103,), (0, 4), (1, 1))
RATES = {
    0: {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-4, "weight_decay": 0.2},
    1: {"lr": 0.05, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "weight_decay": 0.1},
}
"""By mode, so that no rate has the same value in every sample."""
STEP = {0: 3, 1: 5}
"""Also by mode."""


def lists(generator: torch.Generator, *dtypes: torch.dtype) -> list[list[Tensor]]:
    """A list of random tensors of the same shapes in each of ``dtypes``."""
    return [[random(generator, shape, dtype) for shape in _SHAPES] for dtype in dtypes]


def operands(generator: torch.Generator, *dtypes: torch.dtype) -> list[list[Tensor]]:
    """Gradients, parameters, first moments, second moments (not negative), and more."""
    tensors = lists(generator, *dtypes)
    tensors[3] = [v.abs() for v in tensors[3]]
    return tensors


def flag(value: int = 0) -> Tensor:
    """An int32 tensor ``[1]``."""
    return torch.tensor([value], dtype=torch.int32)


def call(tensors: list[list[Tensor]], noop: int = 0, **options: Any) -> dict[str, Any]:
    """The arguments of a kernel over lists."""
    return {"chunk_size": 64, "noop_flag": flag(noop), "tensor_lists": tensors, **options}


@record("multi_tensor_scale")
def scale(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for out in FLOATS:
        inputs, outputs = lists(generator, dtype, out)
        wanted = [Output(f"tensor_lists.1.{i}", x.double() * 0.3, out) for i, x in enumerate(inputs)]
        yield Sample(f"to {out}", call([inputs, outputs], scale=0.3), (*wanted, Output("noop_flag", flag())))
    lost = torch.tensor([1.0, torch.inf]).to(dtype)
    yield Sample(
        "infinite",
        call([[lost], [torch.zeros(2, dtype=dtype)]], scale=2.0),
        (Output("noop_flag", flag(1)), Output("tensor_lists.1.0", lost.double() * 2, dtype)),
    )


def norms(tensors: list[Tensor], each: bool | None) -> tuple[Output, Output]:
    """The norm of all float64 ``tensors``, and those of each where they are asked for."""
    squares = torch.stack([x.square().sum() for x in tensors])
    norm_of_each = squares.sqrt() if each else torch.zeros(0, dtype=torch.float64)
    return Output(0, squares.sum().sqrt()[None], length=4200), Output(1, norm_of_each, length=4200)


@record("multi_tensor_l2norm")
def l2norm(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for each in (False, True):
        (tensors,) = lists(generator, dtype)
        outputs = (*norms([x.double() for x in tensors], each), Output("noop_flag", flag()))
        yield Sample(f"each {each}", call([tensors], per_tensor_python=each), outputs)


def step(tensors: tuple[Tensor, ...], mode: int, correction: int) -> tuple[Tensor, Tensor, Tensor]:
    """``(p, m, v)`` after a step of Adam, float64."""
    g, p, m, v, *master = (x.double() for x in tensors)
    p = master[0] if master else p
    lr, beta1, beta2, epsilon, weight_decay = RATES[mode].values()
    bc1, bc2 = (1 - beta1 ** STEP[mode], 1 - beta2 ** STEP[mode]) if correction else (1, 1)
    g = g + weight_decay * p if mode == 0 else g
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    u = (m / bc1) / ((v / bc2).sqrt() + epsilon) + (weight_decay * p if mode == 1 else 0)
    return p - lr * u, m, v


BOUND = 40.0
"""The magnitude of the steps of these samples: they divide by a root that may be as small as epsilon."""


def stepping(mode: int, correction: int) -> dict[str, Any]:
    """The options of a step."""
    return {"step": STEP[mode], "mode": mode, "bias_correction": correction, **RATES[mode]}


def stepped(group: tuple[Tensor, ...], mode: int, correction: int, i: int, moments: torch.dtype = torch.float32) -> tuple[Tensor, tuple[Output, ...]]:
    """The new parameter, float64, and the outputs of both moments."""
    p, m, v = step(group, mode, correction)
    return p, tuple(Output(f"tensor_lists.{place}.{i}", x, moments, magnitude=8.0) for place, x in ((2, m), (3, v)))


@record("multi_tensor_adam")
def adam(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for mode, correction, moments, master in ((0, 1, torch.float32, False), (1, 0, torch.float32, True), (1, 1, torch.bfloat16, False)):
        tensors = operands(generator, dtype, dtype, moments, moments, *((torch.float32,) if master else ()))
        outputs = []
        for i, group in enumerate(zip(*tensors, strict=True)):
            p, both = stepped(group, mode, correction, i, moments)
            outputs += [Output(f"tensor_lists.1.{i}", p, dtype, magnitude=BOUND), *both]
            outputs += [Output(f"tensor_lists.4.{i}", p, magnitude=BOUND)] if master else []
            outputs.append(Output(f"tensor_lists.0.{i}", group[0].clone()))
        label = f"mode {mode} correction {correction} moments {moments} master {master}"
        yield Sample(label, call(tensors, 1, **stepping(mode, correction)), tuple(outputs))
