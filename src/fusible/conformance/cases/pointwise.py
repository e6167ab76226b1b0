"""Records of the activations, against formulae in float64. The derivatives are computed by float64 autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from fusible.conformance.table import Output, Sample, random, record, strided

SHAPES = ((16, 64), (3, 5, 14), (1, 2), (0, 8), (3, 2, 1442))


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def dgelu(x: Tensor) -> Tensor:
    """The derivative of ``gelu``, element by element."""
    return torch.func.grad(lambda y: gelu(y).sum())(x)


def erf_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * torch.special.erfc(-math.sqrt(0.5) * x)


def qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def srelu(x: Tensor) -> Tensor:
    return torch.relu(x) ** 2


def gated(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def both(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return f(a) * b

    return both


def situglu(x: Tensor, beta1: float = 4.0, beta2: float = 25.0) -> Tensor:
    a, b = x.chunk(2, -1)
    return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(b / beta2)


def clamped_swiglu(x: Tensor, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> Tensor:
    a, b = x.chunk(2, -1)
    c = a.clamp(max=limit)
    return c * torch.sigmoid(alpha * c) * (b.clamp(-limit, limit) + glu_linear_offset)


PLAIN = {"gelu": gelu, "erf_gelu": erf_gelu, "silu": silu, "relu": torch.relu, "qgelu": qgelu, "srelu": srelu}
GATED = {
    "glu": gated(torch.sigmoid),
    "geglu": gated(gelu),
    "erf_geglu": gated(erf_gelu),
    "qgeglu": gated(qgelu),
    "reglu": gated(torch.relu),
    "sreglu": gated(srelu),
    "swiglu": gated(silu),
    "situglu": situglu,
    "clamped_swiglu": clamped_swiglu,
}
UNBOUNDED = {"situglu": {"beta1": 1e20, "beta2": 1e20}, "clamped_swiglu": {"limit": 1e30}}
"""Options by which large results stay large."""

OPTIONS = {"situglu": {"beta1": 1.5, "beta2": 3.0}, "clamped_swiglu": {"limit": 1.25, "alpha": 1.1, "glu_linear_offset": 0.5}}


def inputs(generator: torch.Generator, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for shape in SHAPES:
        yield str(list(shape)), random(generator, shape, dtype, 2.0)
    yield "strided", strided(generator, (6, 4, 10), dtype)


def choices(options: dict[str, float]) -> Iterator[dict[str, float]]:
    """All options together; each one alone with another value; and values that bound nothing."""
    if options:
        yield from (options, *({name: 0.75 * value} for name, value in options.items()))
        yield from (chosen for chosen in UNBOUNDED.values() if chosen.keys() <= options.keys())


def forward(generator: torch.Generator, dtype: torch.dtype, f: Callable[..., Tensor], options: dict[str, float]) -> Iterator[Sample]:
    for label, x in inputs(generator, dtype):
        magnitude = 1 + f(x.double()).abs().max().item() if x.numel() else 1.0
        yield Sample(label, {"input": x, "quantizer": None}, (Output(None, f(x.double()), dtype, magnitude=magnitude),))
    for chosen in choices(options):
        x = random(generator, (4, 6), dtype, 3.0)
        wanted = Output(None, f(x.double(), **chosen), dtype, magnitude=160.0)
        yield Sample(f"options {chosen}", {"input": x, "quantizer": None, **chosen}, (wanted,))


def backward(
    generator: torch.Generator, dtype: torch.dtype, f: Callable[..., Tensor], options: dict[str, float], *, bias: bool = False
) -> Iterator[Sample]:
    cases = [(label, x, {}) for label, x in inputs(generator, dtype)]
    for one in choices(options):
        x = random(generator, (4, 6), dtype, 3.0)
        if one.get("limit", 1e3) < 1e3:  # both operands at the limits, where the gradient still goes through
            x[1] = torch.tensor([1.0, -1.0, 0.5] * 2) * one["limit"]
        cases.append((f"options {one}", x, one))
    for label, x, chosen in cases:
        y, pullback, *_ = torch.func.vjp(partial(f, **chosen), x.double())
        g = random(generator, tuple(y.shape), dtype)
        (dx,) = pullback(g.double())
        magnitude = 4 + 4 * dx.abs().max().item() if dx.numel() else 1.0
        arguments = {"grad": g, "fwd_input": x, "quantizer": None, **chosen}
        if not bias:
            yield Sample(label, arguments, (Output(None, dx, dtype, magnitude=magnitude),))
            continue
        rows = dx.reshape(-1, dx.shape[-1])
        summed = Output(0, rows.sum(0), dtype, rows.shape[0], magnitude)
        yield Sample(label, arguments, (Output(1, dx, dtype, magnitude=magnitude), summed))


def gradient_of(name: str) -> str:
    """The name of an activation's gradient."""
    lead, underscore, last = name.rpartition("_")
    return f"{lead}{underscore}d{last}"


for _name, _f in (PLAIN | GATED).items():
    _options = OPTIONS.get(_name, {})
    record(_name, quantizes=True)(partial(forward, f=_f, options=_options))
    record(gradient_of(_name), quantizes=True)(partial(backward, f=_f, options=_options))
for _name, _f in PLAIN.items():
    record(f"dbias_{gradient_of(_name)}", quantizes=True)(partial(backward, f=_f, options={}, bias=True))
