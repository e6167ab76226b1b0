"""Right calls of nvte: activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from nvte_draws import DRAWN_CALLS, Draw, DrawnCall, Wanted, draws, f64
from torch.nn import functional as F

from fusible.nvte import Tensor

# Activations: each a formula, whose gradient autograd takes.

Formula = Callable[[torch.Tensor], torch.Tensor]


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


PLAIN: dict[str, Formula] = {
    "gelu": gelu,
    "erf_gelu": F.gelu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "silu": F.silu,
    "srelu": lambda x: torch.relu(x).square(),
}
GATES: dict[str, Formula] = {
    "glu": torch.sigmoid,
    "geglu": PLAIN["gelu"],
    "erf_geglu": PLAIN["erf_gelu"],
    "qgeglu": PLAIN["qgelu"],
    "reglu": PLAIN["relu"],
    "sreglu": PLAIN["srelu"],
    "swiglu": PLAIN["silu"],
}


def _gated(f: Formula) -> Formula:
    return lambda x: f(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


def _situglu(beta1: float = 4.0, beta2: float = 25.0) -> Formula:
    def formula(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(b / beta2)

    return formula


def _clamped(limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Formula:
    def formula(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        a = a.clamp(max=limit)
        return a * torch.sigmoid(alpha * a) * (b.clamp(-limit, limit) + offset)

    return formula


def gradient(formula: Formula, dy: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients of ``formula`` in its inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.enable_grad():
        return torch.autograd.grad(formula(*leaves), leaves, dy)


def nearly(value: torch.Tensor, *inputs: torch.Tensor, **more: Any) -> Wanted:
    """Of a formula that may cancel: its error is of the size of what goes in."""
    size = max([1.0, *(x.abs().max().item() for x in inputs if x.numel())]) ** 3
    return Wanted(value, 32, torch.full_like(value, size), **more)


def _enter_activation(name: str, backward: str, make: Callable[..., Formula], width: int, options: Sequence[float] = ()) -> None:
    def shapes(draw: Draw) -> tuple[tuple[int, int], tuple[int, int], tuple[float, ...]]:
        rows, columns = draw.rows(), draw.columns()
        return (rows, columns), (rows, width * columns), tuple(options) if draw.of(True, False) else ()

    def forward(draw: Draw) -> DrawnCall:
        _, shape, given = shapes(draw)
        x, type = draw.tensor(*shape), draw.out()
        return DrawnCall({"x": x, "type": type}, [nearly(make(*given)(f64(x)), f64(x), type=type, rounded=(x.type,))], given)

    def back(draw: Draw) -> DrawnCall:
        out, shape, given = shapes(draw)
        kind = draw.type()
        dy, x, type = draw.tensor(*out, type=kind), draw.tensor(*shape, type=kind), draw.out()
        (dx,) = gradient(make(*given), f64(dy), f64(x))
        return DrawnCall({"dy": dy, "x": x, "type": type}, [nearly(dx, f64(x), f64(dy), type=type, rounded=(kind,))], given)

    DRAWN_CALLS[name], DRAWN_CALLS[backward] = forward, back


def _enter_scaled(name: str, backward: str, make: Callable[..., Formula], width: int, options: Sequence[float] = ()) -> None:
    def arguments(draw: Draw) -> tuple[Tensor, Tensor, Tensor, tuple[float, ...]]:
        rows, columns, kind = draw.rows(), draw.columns(), draw.type()
        given = tuple(options) if draw.of(True, False) else ()
        return draw.tensor(rows, columns, type=kind), draw.tensor(rows, width * columns, type=kind), draw.tensor(rows), given

    def forward(draw: Draw) -> DrawnCall:
        _, x, scales, given = arguments(draw)
        type = draw.out()
        y = make(*given)(f64(x)) * f64(scales)[:, None]
        return DrawnCall({"x": x, "scales": scales, "type": type}, [nearly(y, f64(x), f64(scales), type=type, rounded=(x.type,))], given)

    def back(draw: Draw) -> DrawnCall:
        dy, x, scales, given = arguments(draw)
        type, wanted = draw.out(), draw.of(True, False)
        formula = make(*given)
        dx, dscales = gradient(lambda x, s: formula(x) * s[:, None], f64(dy), f64(x), f64(scales))  # type: ignore[misc]
        sizes = (f64(x), f64(dy), f64(scales))
        per_row = nearly(dscales, *sizes)
        per_row = Wanted(dscales, dy.shape[1], per_row.magnitude * max(1, dy.shape[1]), type=scales.type)  # type: ignore[operator]
        call = {"dy": dy, "x": x, "scales": scales, "type": type, "scales_gradient": wanted}
        return DrawnCall(call, [nearly(dx, *sizes, type=type, rounded=(x.type,)), per_row if wanted else None], given)

    DRAWN_CALLS[name], DRAWN_CALLS[backward] = forward, back


def _enter_dbias(name: str, formula: Formula) -> None:
    def back(draw: Draw) -> DrawnCall:
        kind = draw.type()
        shape, type, dbias_type = (draw.rows(), draw.columns()), draw.out(), draw.type()
        dy, x = draw.tensor(*shape, type=kind), draw.tensor(*shape, type=kind)
        (dx,) = gradient(formula, f64(dy), f64(x))
        near = nearly(dx, f64(x), f64(dy), type=type, rounded=(kind,))
        sums = Wanted(dx.sum(0), 32 * shape[0], near.magnitude.sum(0), type=dbias_type, rounded=(kind,))  # type: ignore[union-attr]
        return DrawnCall({"dy": dy, "x": x, "type": type, "dbias_type": dbias_type}, [near, sums])

    DRAWN_CALLS[f"dbias_{_backward(name)}"] = back


def _backward(name: str) -> str:
    lead, underscore, last = name.rpartition("_")
    return f"{lead}{underscore}d{last}"


for _name, _formula in PLAIN.items():
    _enter_activation(_name, _backward(_name), lambda f=_formula: f, 1)
    _enter_dbias(_name, _formula)
for _name, _formula in GATES.items():
    _enter_activation(_name, _backward(_name), lambda f=_formula: _gated(f), 2)
_enter_activation("situglu", "dsituglu", _situglu, 2, (3.0, 10.0))
_enter_activation("clamped_swiglu", "clamped_dswiglu", _clamped, 2, (1.5, 1.0, 0.5))
_enter_scaled("scaled_srelu", "scaled_dsrelu", lambda: PLAIN["srelu"], 1)
_enter_scaled("scaled_swiglu", "scaled_dswiglu", lambda: _gated(F.silu), 2)
_enter_scaled("scaled_situglu", "scaled_dsituglu", _situglu, 2)
_enter_scaled("scaled_clamped_swiglu", "scaled_clamped_dswiglu", _clamped, 2)


@draws("cast_transpose_dbias_dgelu_checked")
def _(draw: Draw) -> DrawnCall:
    given = DRAWN_CALLS["dbias_dgelu"](draw)
    dx, dbias = given.wanted  # type: ignore[misc]
    return DrawnCall(given.arguments, [dx, transposed(dx), dbias])


@draws("cast_transpose_dgeglu_checked")
def _(draw: Draw) -> DrawnCall:
    given = DRAWN_CALLS["dgeglu"](draw)
    return DrawnCall(given.arguments, [given.wanted[0], transposed(given.wanted[0])])  # type: ignore[index]


def transposed(wanted: Any) -> Wanted:
    magnitude = None if wanted.magnitude is None else wanted.magnitude.T
    return Wanted(wanted.value.T, wanted.length, magnitude, wanted.exact, wanted.type, wanted.rounded)
