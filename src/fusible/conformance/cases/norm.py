"""Records of the normalizations, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fusible.conformance.table import Output, Sample, random, record, strided

SHAPES = ((16, 64), (3, 5, 7), (1, 1), (0, 8), (2, 1000), (7, 611))


def cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor, Tensor, bool, torch.dtype]]:
    for shape, centered in itertools.product(SHAPES, (False, True)):
        x = random(generator, shape, dtype)
        w, b = (random(generator, shape[-1:], torch.float32 if centered else dtype) for _ in range(2))
        yield f"{list(shape)}-{centered}", x, w, b, centered, dtype
    x = strided(generator, (6, 4, 10), dtype)
    yield "strided", x, random(generator, (10,), dtype), random(generator, (10,), dtype), False, torch.float32


def magnitude(*tensors: Tensor) -> float:
    """The largest intermediate of a normalization: a product of the largest elements, times the largest rsigma."""
    value = 1.0
    for tensor in tensors:
        value *= 1 + (tensor.double().abs().max().item() if tensor.numel() else 0)
    return value


EPS = 1e-3


def statistics(x: Tensor, *, centered: bool, eps: float = EPS) -> tuple[Tensor, Tensor]:
    mu = x.mean(-1, keepdim=True) if centered else torch.zeros_like(x[..., :1])
    return mu, 1 / torch.sqrt(((x - mu) ** 2).mean(-1, keepdim=True) + eps)


def scale(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.double() + (1 if zero_centered else 0)


@record("layernorm_fwd", quantizes=True)
def layernorm_fwd(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for label, x, w, b, zero_centered, otype in cases(generator, dtype):
        mu, rs = statistics(x.double(), centered=True)
        y = (x.double() - mu) * rs * scale(w, zero_centered) + b.double()
        options = {"eps": EPS, "ln_out": None, "quantizer": None, "otype": otype, "sm_margin": 0, "zero_centered_gamma": zero_centered}
        size = magnitude(x, w, rs)
        of_statistics = Output(1, mu.flatten(), magnitude=size), Output(2, rs.flatten(), torch.float32, x.shape[-1], size)
        outputs = Output(0, y, otype, x.shape[-1], size), *of_statistics
        yield Sample(label, {"input": x, "weight": w, "bias": b, **options}, outputs)
    arguments = {"input": x, "weight": w, "bias": b, **options, "ln_out": torch.full(x.shape, 9.0, dtype=otype)}
    yield Sample("into ln_out", arguments, (*outputs, replace(outputs[0], at="ln_out")))
    mu, rs = statistics(x.double(), centered=True, eps=0.5)
    y = (x.double() - mu) * rs * scale(w, zero_centered) + b.double()
    outputs = Output(0, y, otype, x.shape[-1], size), Output(1, mu.flatten(), magnitude=size), Output(2, rs.flatten(), magnitude=size)
    yield Sample("a large eps", {"input": x, "weight": w, "bias": b, **options, "eps": 0.5}, outputs)


@record("rmsnorm_fwd", quantizes=True)
def rmsnorm_fwd(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for label, x, w, _, zero_centered, otype in cases(generator, dtype):
        _, rs = statistics(x.double(), centered=False)
        options = {"eps": EPS, "ln_out": None, "quantizer": None, "otype": otype, "sm_margin": 0, "zero_centered_gamma": zero_centered}
        y = Output(0, x.double() * rs * scale(w, zero_centered), otype, x.shape[-1])
        rest = (Output(1, None), Output(2, rs.flatten(), torch.float32, x.shape[-1]))
        yield Sample(label, {"input": x, "weight": w, **options}, (y, *rest))
    arguments = {"input": x, "weight": w, **options, "ln_out": torch.full(x.shape, 9.0, dtype=otype)}
    yield Sample("into ln_out", arguments, (y, replace(y, at="ln_out"), *rest))
    _, rs = statistics(x.double(), centered=False, eps=0.5)
    y = Output(0, x.double() * rs * scale(w, zero_centered), otype, x.shape[-1])
    rest = Output(1, None), Output(2, rs.flatten(), torch.float32, x.shape[-1])
    yield Sample("a large eps", {"input": x, "weight": w, **options, "eps": 0.5}, (y, *rest))


def gradients(x: Tensor, dz: Tensor, w: Tensor, zero_centered: bool, *, centered: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(mu, rs, dx, dgamma)`` by float64 autograd."""
    mu, rs = statistics(x.double(), centered=centered)

    def normalized(point: Tensor, gamma: Tensor) -> Tensor:
        mu, rs = statistics(point, centered=centered)
        return (point - mu) * rs * (gamma + (1 if zero_centered else 0))

    _, pullback, *_ = torch.func.vjp(normalized, x.double(), w.double())
    return mu.flatten(), rs.flatten(), *pullback(dz.double())


def backward(generator: torch.Generator, dtype: torch.dtype, *, centered: bool, with_add: bool) -> Iterator[Sample]:
    for label, x, w, _, zero_centered, _ in cases(generator, dtype):
        dz = random(generator, tuple(x.shape), dtype)
        mu, rs, dx, dgamma = gradients(x, dz, w, zero_centered, centered=centered)
        size, rows = magnitude(x, dz, w, rs), max(1, rs.numel())
        arguments = {"dz": dz, "x": x, "rsigma": rs.float(), "gamma": w, "sm_margin": 0, "zero_centered_gamma": zero_centered}
        if with_add:
            arguments["add"] = random(generator, tuple(x.shape), dtype)
            dx = dx + arguments["add"].double()
        outputs = [Output(0, dx, dtype, x.shape[-1], size), Output(1, dgamma, w.dtype, rows, size)]
        if centered:
            arguments["mu"] = mu.float()
            outputs.append(Output(2, dz.double().reshape(-1, x.shape[-1]).sum(0), w.dtype, rows, size))
        yield Sample(label, arguments, tuple(outputs))


record("layernorm_bwd")(partial(backward, centered=True, with_add=False))
record("prim_layernorm_bwd_add")(partial(backward, centered=True, with_add=True))
record("rmsnorm_bwd")(partial(backward, centered=False, with_add=False))
record("rmsnorm_bwd_add")(partial(backward, centered=False, with_add=True))
