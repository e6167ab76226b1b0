"""Right calls of nvte: norms and dropout."""

from __future__ import annotations

from typing import Any

import torch
from nvte_draws import DRAWN_CALLS, Draw, DrawnCall, Wanted, draws, f64, share
from nvte_functions_activations import gradient

from fusible import nvte
from fusible.nvte import DType, Tensor, Type

# Norms.


def _norm(draw: Draw, *, bias: bool) -> tuple[dict[str, Any], torch.Tensor]:
    """The arguments of a norm, and its gamma."""
    kind, shape = draw.type(), (draw.rows(), draw.columns())
    x, weight, zero_centered = draw.tensor(*shape, type=kind), draw.tensor(shape[1], type=kind), draw.of(True, False)
    arguments = {"x": x, "weight": weight, **({"bias": draw.tensor(shape[1], type=kind)} if bias else {}), "eps": draw.of(1e-5, 1e-2)}
    return {**arguments, "zero_centered_gamma": zero_centered}, f64(weight) + float(zero_centered)


def _statistics(x: torch.Tensor, eps: float, *, centered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    mu = x.mean(-1) if centered else torch.zeros(x.shape[:-1]).double()
    return mu, ((x - mu[:, None]).square().mean(-1) + eps).rsqrt()


def _loose(value: torch.Tensor, x: torch.Tensor, factor: torch.Tensor | float, **more: Any) -> Wanted:
    """What is divided by a deviation loses digits where the deviation is small beside the values."""
    size = (1 + x.abs().amax() ** 2 if x.numel() else 1.0) * factor
    return Wanted(value, 8 * x.shape[-1], torch.ones_like(value) * size, **more)


@draws("layernorm")
def _(draw: Draw) -> DrawnCall:
    arguments, gamma = _norm(draw, bias=True)
    x, type = f64(arguments["x"]), draw.out()
    mu, rsigma = _statistics(x, arguments["eps"], centered=True)
    hat = (x - mu[:, None]) * rsigma[:, None]
    y, worst = hat * gamma + f64(arguments["bias"]), rsigma.amax() ** 3 + 1 if rsigma.numel() else 1.0
    wanted = [
        _loose(y, x, worst * (1 + gamma.abs().amax()), type=type), _loose(mu, x, 1.0, type=DType.Float32),
        _loose(rsigma, x, worst, type=DType.Float32),
    ]  # fmt: skip
    return DrawnCall({**arguments, "type": type}, wanted)


@draws("rmsnorm")
def _(draw: Draw) -> DrawnCall:
    arguments, gamma = _norm(draw, bias=False)
    x, type = f64(arguments["x"]), draw.out()
    _, rsigma = _statistics(x, arguments["eps"], centered=False)
    worst = rsigma.amax() ** 3 + 1 if rsigma.numel() else 1.0
    y = _loose(x * rsigma[:, None] * gamma, x, worst * (1 + gamma.abs().amax()), type=type)
    return DrawnCall({**arguments, "type": type}, [y, _loose(rsigma, x, worst, type=DType.Float32)])


@draws("l2norm")
def _(draw: Draw) -> DrawnCall:
    x, type, eps = draw.tensor(draw.rows(), draw.columns()), draw.out(), draw.of(1e-5, 1e-2)
    values = f64(x)
    return DrawnCall(
        {"x": x, "eps": eps, "type": type}, [Wanted(values * (values.square().sum(-1) + eps).rsqrt()[:, None], x.shape[1], type=type), None]
    )


def _backward(draw: Draw, *, centered: bool, add: bool) -> DrawnCall:
    arguments, gamma = _norm(draw, bias=False)
    x, weight = arguments["x"], arguments["weight"]
    mu, rsigma = _statistics(f64(x), arguments["eps"], centered=centered)
    dy, type = draw.tensor(*x.shape, type=x.type), draw.type()  # type: ignore[arg-type]
    mu32, rsigma32 = mu.float().double(), rsigma.float().double()

    def dx_of(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        hat, g = (x - mu32[:, None]) * rsigma32[:, None], f64(dy) * gamma
        mean = g.mean(-1, keepdim=True) if centered else 0.0
        return rsigma32[:, None] * (g - mean - hat * (g * hat).mean(-1, keepdim=True))

    hat = (f64(x) - mu32[:, None]) * rsigma32[:, None]
    dx, dgamma = dx_of(f64(x), gamma), (f64(dy) * hat).sum(0)
    factor = (1 + f64(dy).abs().amax()) * (1 + gamma.abs().amax()) * (1 + rsigma.amax()) ** 3 if x.data.numel() else 1.0
    call = {"dy": dy, "x": x, **({"mu": _fp32(mu)} if centered else {}), "rsigma": _fp32(rsigma), "weight": weight}
    call["zero_centered_gamma"] = arguments["zero_centered_gamma"]
    rounded: tuple[Type, ...] = (x.type,)
    if add:
        call["addend"] = draw.tensor(*x.shape, type=x.type)  # type: ignore[arg-type]
        dx = dx + f64(call["addend"])
    rows = x.shape[0]
    wanted = [_loose(dx, f64(x), factor, type=type, rounded=rounded), _loose(dgamma, f64(x), factor * (1 + rows), type=weight.type)]
    if centered:
        wanted.append(Wanted(f64(dy).sum(0), rows, f64(dy).abs().sum(0), type=weight.type))
    return DrawnCall({**call, "type": type}, wanted)


def _fp32(x: torch.Tensor) -> Tensor:
    return nvte.make_nvte_tensor(x.float())


DRAWN_CALLS["dlayernorm"] = lambda draw: _backward(draw, centered=True, add=False)
DRAWN_CALLS["dlayernorm_add"] = lambda draw: _backward(draw, centered=True, add=True)
DRAWN_CALLS["drmsnorm"] = lambda draw: _backward(draw, centered=False, add=False)
DRAWN_CALLS["drmsnorm_add"] = lambda draw: _backward(draw, centered=False, add=True)


@draws("dl2norm")
def _(draw: Draw) -> DrawnCall:
    x, eps = draw.tensor(draw.rows(), draw.columns()), 1e-2
    dy, type = draw.tensor(*x.shape, type=x.type), draw.type()  # type: ignore[arg-type]
    values, n = f64(x), x.shape[1]
    (dx,) = gradient(lambda v: v * (v.square().sum(-1, keepdim=True) + eps).rsqrt(), f64(dy), values)
    rsigma = (values.square().mean(-1) + eps / n).rsqrt()
    factor = (1 + f64(dy).abs().amax()) * (1 + rsigma.amax()) ** 3 * n if x.data.numel() else 1.0
    return DrawnCall({"dy": dy, "x": x, "rsigma": _fp32(rsigma), "type": type}, [_loose(dx, values, factor, type=type, rounded=(x.type,))])


# Dropout.


@draws("dropout")
def _(draw: Draw) -> DrawnCall:
    x, p, type = draw.tensor(draw.rows(), draw.columns()), draw.of(0.0, 0.25, 0.9), draw.type()
    values = f64(x)

    def check(found: Any) -> None:
        y, mask = found
        kept = mask.data.double()
        assert set(kept.unique().tolist()) <= {0.0, 1.0} and mask.shape == x.shape
        assert share(y, Wanted(values * kept / (1 - p), rounded=(x.type,)), type) <= 1
        assert p or kept.all()

    seed = nvte.make_nvte_tensor(torch.tensor([draw.random.randrange(2**40)]))
    return DrawnCall({"x": x, "probability": p, "seed": seed, "offset": draw.of(0, 7), "type": type}, check)


@draws("ddropout")
def _(draw: Draw) -> DrawnCall:
    dy, p, type = draw.tensor(draw.rows(), draw.columns()), draw.of(0.0, 0.25), draw.type()
    mask = nvte.make_nvte_tensor((torch.rand(dy.shape, generator=draw.generator) < 0.5).to(torch.uint8))
    wanted = Wanted(f64(dy) * f64(mask) / (1 - p), type=type, rounded=(dy.type,))
    return DrawnCall({"dy": dy, "mask": mask, "probability": p, "type": type}, [wanted])
