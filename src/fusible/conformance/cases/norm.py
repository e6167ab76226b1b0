"""Records of the normalizations, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fusible.conformance.table import Output, Sample, Sampler, random, record, strided

SHAPES = ((16, 64), (3, 5, 7), (1, 1), (0, 8), (2, 1000), (7, 611))


def cases(generator: torch.Generator, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor, Tensor, bool, torch.dtype]]:
    for shape in SHAPES:
        for centered in (False, True):
            weight_dtype = torch.float32 if centered else dtype
            x = random(generator, shape, dtype)
            yield (
                f"{list(shape)}-{centered}",
                x,
                random(generator, shape[-1:], weight_dtype),
                random(generator, shape[-1:], weight_dtype),
                centered,
                dtype,
            )
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
        yield Sample(
            label,
            {"input": x, "weight": w, "bias": b, **options},
            (
                Output(0, y, otype, x.shape[-1], size),
                Output(1, mu.flatten(), magnitude=size),
                Output(2, rs.flatten(), torch.float32, x.shape[-1], size),
            ),
        )
    outputs = Output(1, mu.flatten(), magnitude=size), Output(2, rs.flatten(), torch.float32, x.shape[-1], size)
    given = {"input": x, "weight": w, "bias": b, **options, "ln_out": torch.full(x.shape, 9.0, dtype=otype)}
    written = Output(0, y, otype, x.shape[-1], size), Output("ln_out", y, otype, x.shape[-1], size)
    yield Sample("into ln_out", given, (*written, *outputs))
    mu, rs = statistics(x.double(), centered=True, eps=0.5)
    y = (x.double() - mu) * rs * scale(w, zero_centered) + b.double()
    outputs = Output(0, y, otype, x.shape[-1], size), Output(1, mu.flatten(), magnitude=size), Output(2, rs.flatten(), magnitude=size)
    yield Sample("a large eps", {"input": x, "weight": w, "bias": b, **options, "eps": 0.5}, outputs)


@record("rmsnorm_fwd", quantizes=True)
def rmsnorm_fwd(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for label, x, w, _, zero_centered, otype in cases(generator, dtype):
        _, rs = statistics(x.double(), centered=False)
        options = {"eps": EPS, "ln_out": None, "quantizer": None, "otype": otype, "sm_margin": 0, "zero_centered_gamma": zero_centered}
        value = x.double() * rs * scale(w, zero_centered)
        y, rest = Output(0, value, otype, x.shape[-1]), (Output(1, None), Output(2, rs.flatten(), torch.float32, x.shape[-1]))
        yield Sample(label, {"input": x, "weight": w, **options}, (y, *rest))
    given = {"input": x, "weight": w, **options, "ln_out": torch.full(x.shape, 9.0, dtype=otype)}
    yield Sample("into ln_out", given, (y, Output("ln_out", value, otype, x.shape[-1]), *rest))
    _, rs = statistics(x.double(), centered=False, eps=0.5)
    y = Output(0, x.double() * rs * scale(w, zero_centered), otype, x.shape[-1])
    rest = Output(1, None), Output(2, rs.flatten(), torch.float32, x.shape[-1])
    yield Sample("a large eps", {"input": x, "weight": w, **options, "eps": 0.5}, (y, *rest))


def backward(x: Tensor, dz: Tensor, w: Tensor, zero_centered: bool, *, centered: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(mu, rs, dx, dgamma, dbeta)`` by float64 autograd."""
    point, gamma = x.double().requires_grad_(), w.double().requires_grad_()
    with torch.enable_grad():
        mu, rs = statistics(point, centered=centered)
        y = (point - mu) * rs * (gamma + (1 if zero_centered else 0))
    dx, dgamma = torch.autograd.grad(y, (point, gamma), dz.double())
    dbeta = dz.double().reshape(-1, x.shape[-1]).sum(0)
    return mu.detach().flatten(), rs.detach().flatten(), dx, dgamma, dbeta


def layernorm_backward(*, with_add: bool) -> Sampler:
    def sample(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
        for label, x, w, _, zero_centered, _ in cases(generator, dtype):
            dz = random(generator, tuple(x.shape), dtype)
            mu, rs, dx, dgamma, dbeta = backward(x, dz, w, zero_centered, centered=True)
            size, rows = magnitude(x, dz, w, rs), max(1, rs.numel())
            arguments = {"dz": dz, "x": x, "mu": mu.float(), "rsigma": rs.float(), "gamma": w, "sm_margin": 0, "zero_centered_gamma": zero_centered}
            if with_add:
                arguments["add"] = random(generator, tuple(x.shape), dtype)
                dx = dx + arguments["add"].double()
            outputs = Output(0, dx, dtype, x.shape[-1], size), Output(1, dgamma, w.dtype, rows, size), Output(2, dbeta, w.dtype, rows, size)
            yield Sample(label, arguments, outputs)

    return sample


record("layernorm_bwd")(layernorm_backward(with_add=False))
record("prim_layernorm_bwd_add")(layernorm_backward(with_add=True))


@record("rmsnorm_bwd")
def rmsnorm_bwd(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for label, x, w, _, zero_centered, _ in cases(generator, dtype):
        dz = random(generator, tuple(x.shape), dtype)
        _, rs, dx, dgamma, _ = backward(x, dz, w, zero_centered, centered=False)
        size, rows = magnitude(x, dz, w, rs), max(1, rs.numel())
        arguments = {"dz": dz, "x": x, "rsigma": rs.float(), "gamma": w, "sm_margin": 0, "zero_centered_gamma": zero_centered}
        yield Sample(label, arguments, (Output(0, dx, dtype, x.shape[-1], size), Output(1, dgamma, w.dtype, rows, size)))


@record("rmsnorm_bwd_add")
def rmsnorm_bwd_add(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for label, x, w, _, zero_centered, _ in cases(generator, dtype):
        dz, add = random(generator, tuple(x.shape), dtype), random(generator, tuple(x.shape), dtype)
        _, rs, dx, dgamma, _ = backward(x, dz, w, zero_centered, centered=False)
        size, rows = magnitude(x, dz, w, rs), max(1, rs.numel())
        arguments = {"dz": dz, "x": x, "add": add, "rsigma": rs.float(), "gamma": w, "sm_margin": 0, "zero_centered_gamma": zero_centered}
        yield Sample(label, arguments, (Output(0, dx + add.double(), dtype, x.shape[-1], size), Output(1, dgamma, w.dtype, rows, size)))
