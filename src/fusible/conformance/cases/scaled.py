"""Records of the activations with a scale per row, against float64. The derivatives are computed by float64 autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.cases.pointwise import OPTIONS, clamped_swiglu, gated, silu, situglu, srelu
from fusible.conformance.table import Output, Sample, random, record, strided

SHAPES = ((6, 24), (2, 5, 12), (1, 12), (0, 12), (3, 2, 1452))
INTERLEAVES = (0, 2, 6)
GATED: dict[str, Callable[..., Tensor]] = {"swiglu": gated(silu), "situglu": situglu, "clamped_swiglu": clamped_swiglu}


def side_by_side(x: Tensor, interleave: int) -> Tensor:
    """Blocks ``[a b a b ...]`` of ``interleave`` columns as ``[a a ... b b ...]``, column by column."""
    if not interleave:
        return x
    half = x.shape[-1] // 2
    columns = [2 * interleave * (i // interleave) + i % interleave for i in range(half)]
    return x[..., columns + [column + interleave for column in columns]]


Case = tuple[str, Tensor, Tensor, dict[str, Any]]


def cases(generator: torch.Generator, dtype: torch.dtype, options: dict[str, float], gate: bool) -> Iterator[Case]:
    """Label, input, scales and further arguments. Some scales have another dtype than the input."""
    for shape in SHAPES:
        for interleave in INTERLEAVES if gate else (None,):
            chosen = {} if interleave is None else {"glu_interleave_size": interleave}
            yield f"{list(shape)} {chosen}", random(generator, shape, dtype, 2.0), random(generator, shape[:-1], dtype), chosen
    yield "fp32 scales", random(generator, (4, 12), dtype, 2.0), random(generator, (4,), torch.float32), {}
    yield "strided", strided(generator, (6, 4, 12), dtype), random(generator, (6, 4), dtype), {"glu_interleave_size": 3} if gate else {}
    if options:
        yield "options", random(generator, (4, 12), dtype, 2.0), random(generator, (4,), dtype), {**options, "glu_interleave_size": 1}
        for name, value in options.items():
            yield f"option {name}", random(generator, (4, 12), dtype, 2.0), random(generator, (4,), dtype), {name: 0.75 * value}


def evaluate(f: Callable[..., Tensor], x: Tensor, scales: Tensor, chosen: dict[str, Any]) -> Tensor:
    named = {name: value for name, value in chosen.items() if name != "glu_interleave_size"}
    return f(side_by_side(x, chosen.get("glu_interleave_size", 0)), **named) * scales[..., None]


def largest(*tensors: Tensor) -> float:
    return 1 + sum(x.abs().max().item() for x in tensors if x.numel())


def forward(generator: torch.Generator, dtype: torch.dtype, f: Callable[..., Tensor], options: dict[str, float], gate: bool) -> Iterator[Sample]:
    for label, x, scales, chosen in cases(generator, dtype, options, gate):
        y = evaluate(f, x.double(), scales.double(), chosen)
        # The gates' factors reach 8 times their product where the linear one is near 0.
        yield Sample(label, {"input": x, "act_scales": scales, "quantizer": None, **chosen}, (Output(None, y, dtype, magnitude=8 * largest(y)),))


def backward(generator: torch.Generator, dtype: torch.dtype, f: Callable[..., Tensor], options: dict[str, float], gate: bool) -> Iterator[Sample]:
    for label, x, scales, chosen in cases(generator, dtype, options, gate):
        y, pullback, *_ = torch.func.vjp(partial(evaluate, f, chosen=chosen), x.double(), scales.double())
        g = random(generator, tuple(y.shape), dtype)
        dx, ds = pullback(g.double())
        terms = (g.double() * evaluate(f, x.double(), torch.ones_like(scales.double()), chosen)).abs().sum(-1)
        arguments = {"grad": g, "fwd_input": x, "act_scales": scales, "quantizer": None, **chosen}
        of_input = Output(0, dx, dtype, magnitude=8 * largest(dx, y))
        yield Sample(label, arguments, (of_input, Output(1, ds, scales.dtype, y.shape[-1], largest(terms))))
        if label in ("options", "fp32 scales"):
            yield Sample("no gradient of the scales", {**arguments, "compute_scale_grad": False}, (of_input, Output(1, None)))


for _name, _f in (GATED | {"srelu": srelu}).items():
    _options, _gate = OPTIONS.get(_name, {}), _name in GATED
    record(f"scaled_{_name}", quantizes=True)(partial(forward, f=_f, options=_options, gate=_gate))
    _derivative = "scaled_clamped_dswiglu" if _name == "clamped_swiglu" else f"scaled_d{_name}"
    record(_derivative, quantizes=True)(partial(backward, f=_f, options=_options, gate=_gate))
