"""Right calls of nvte: matrix products, and what is fused to them."""

from __future__ import annotations

from typing import Any

import torch
from nvte_draws import DRAWN_CALLS, FLOATS, FP8, Draw, DrawnCall, Wanted, draws, f64, half_unit
from nvte_functions_activations import gelu, gradient

from fusible import nvte
from fusible.nvte import DType, Tensor, Type

# Matrix products.


def product(a: torch.Tensor, b: torch.Tensor, type: Type | None, *more: torch.Tensor, factor: float = 1.0, **options: Any) -> Wanted:
    """``factor * a @ b`` and what is added."""
    value, magnitude = factor * (a @ b), abs(factor) * (a.abs() @ b.abs())
    for x in more:
        value, magnitude = value + x, magnitude + x.abs()
    return Wanted(value, a.shape[1], magnitude, type=type, **options)


def _operand(draw: Draw, *shape: int, type: DType) -> Tensor:
    """An operand of a product: plain, or in FP8."""
    x = draw.tensor(*shape, type=type)
    return nvte.cast(x, FP8[0]) if draw.of(True, False, False) else x


def _sizes(draw: Draw) -> tuple[int, int, int]:
    return draw.rows(), draw.columns(), draw.columns()


def _tn(draw: Draw, *more: str) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor, DType]:
    tokens, n, k = _sizes(draw)
    kind = draw.type()
    x, weight = _operand(draw, tokens, k, type=kind), _operand(draw, n, k, type=kind)
    shapes = {"bias": (n,), "residual": (tokens, n), "addend": draw.of((n,), (tokens, n))}
    arguments = {"x": x, "weight": weight, **{name: draw.tensor(*shapes[name], type=kind) for name in more}}
    return arguments, f64(x), f64(weight).T, kind


@draws("matmul_transpose")
def _(draw: Draw) -> DrawnCall:
    arguments, x, w, _ = _tn(draw)
    type = draw.out()
    return DrawnCall({**arguments, "type": type}, [product(x, w, type)])


@draws("matmul_transpose_add")
def _(draw: Draw) -> DrawnCall:
    arguments, x, w, _ = _tn(draw, "bias")
    type = draw.out()
    return DrawnCall({**arguments, "type": type}, [product(x, w, type, f64(arguments["bias"]))])


@draws("matmul_transpose_add_add")
def _(draw: Draw) -> DrawnCall:
    arguments, x, w, _ = _tn(draw, "bias", "residual")
    type, alpha = draw.of(*FLOATS), draw.of(1.0, 0.5, -2.0)
    more = [f64(arguments["bias"]), f64(arguments["residual"])]
    if draw.of(True, False):
        arguments["bias"] = None
        more = more[1:]
    # What is added to lies in the type of the result.
    return DrawnCall({**arguments, "type": type, "alpha": alpha}, [product(x, w, type, *more, factor=alpha, slack=half_unit(type, more[-1]))])


def _through_gelu(draw: Draw, *more: str) -> DrawnCall:
    arguments, x, w, kind = _tn(draw, *more)
    type, pre_type = draw.out(), kind
    first = () if "addend" in more or type in FP8 else (type,)
    z = product(x, w, pre_type, *[f64(arguments[name]) for name in more if name == "bias"], rounded=first)
    value = gelu(z.value)
    rounded = (pre_type,)
    if "addend" in more:
        value, rounded = value + f64(arguments["addend"]), (pre_type, pre_type)
    size = z.magnitude + half_unit(pre_type, z.value) * 2**23 + value.abs() + (f64(arguments["addend"]).abs() if "addend" in more else 0)  # type: ignore[operator]
    y = Wanted(value, z.length, size * 1.2, type=type, rounded=rounded)
    return DrawnCall({**arguments, "type": type, "pre_type": pre_type}, [y, z])


DRAWN_CALLS["matmul_transpose_gelu"] = lambda draw: _through_gelu(draw)
DRAWN_CALLS["matmul_transpose_add_gelu"] = lambda draw: _through_gelu(draw, "bias")
DRAWN_CALLS["matmul_transpose_gelu_add"] = lambda draw: _through_gelu(draw, "addend")
DRAWN_CALLS["matmul_transpose_add_gelu_add"] = lambda draw: _through_gelu(draw, "bias", "addend")


def _nn(draw: Draw) -> tuple[Tensor, Tensor, DType]:
    tokens, n, k = _sizes(draw)
    kind = draw.type()
    return _operand(draw, tokens, n, type=kind), _operand(draw, n, k, type=kind), kind


@draws("matmul")
def _(draw: Draw) -> DrawnCall:
    dy, weight, _ = _nn(draw)
    type, alpha = draw.out(), draw.of(1.0, 0.25)
    return DrawnCall({"dy": dy, "weight": weight, "type": type, "alpha": alpha}, [product(f64(dy), f64(weight), type, factor=alpha)])


@draws("matmul_add")
def _(draw: Draw) -> DrawnCall:
    dy, weight, kind = _nn(draw)
    type, addend = draw.of(*FLOATS), draw.tensor(dy.shape[0], weight.shape[1], type=kind)
    wanted = product(f64(dy), f64(weight), type, f64(addend), slack=half_unit(type, f64(addend)))
    return DrawnCall({"dy": dy, "weight": weight, "addend": addend, "type": type}, [wanted])


def _dgelu(draw: Draw) -> tuple[dict[str, Any], Wanted, Type]:
    dy, weight, kind = _nn(draw)
    pre, type = draw.tensor(dy.shape[0], weight.shape[1], type=kind), draw.out()
    d = product(f64(dy), f64(weight), type)
    slope = gradient(gelu, torch.ones_like(d.value), f64(pre))[0]
    size = (d.magnitude + d.value.abs()) * (slope.abs() + 1)  # type: ignore[operator]
    return {"dy": dy, "weight": weight, "pre": pre, "type": type}, Wanted(d.value * slope, d.length, size, type=type), type


@draws("matmul_dgelu")
def _(draw: Draw) -> DrawnCall:
    arguments, d, _ = _dgelu(draw)
    return DrawnCall(arguments, [d])


@draws("matmul_dbias_dgelu")
def _(draw: Draw) -> DrawnCall:
    arguments, d, _ = _dgelu(draw)
    kind, dbias_type = arguments["pre"].type, draw.type()
    sums = Wanted(d.value.sum(0), d.length + d.value.shape[0], d.magnitude.sum(0), type=dbias_type, rounded=(kind, arguments["type"]))  # type: ignore[union-attr]
    return DrawnCall({**arguments, "dbias_type": dbias_type}, [d, sums])


def _nt(draw: Draw) -> tuple[Tensor, Tensor, DType]:
    tokens, n, k = _sizes(draw)
    kind = draw.type()
    return _operand(draw, tokens, n, type=kind), _operand(draw, tokens, k, type=kind), kind


@draws("transpose_matmul")
def _(draw: Draw) -> DrawnCall:
    dy, x, _ = _nt(draw)
    type, alpha = draw.out(), draw.of(1.0, 0.25)
    return DrawnCall({"dy": dy, "x": x, "type": type, "alpha": alpha}, [product(f64(dy).T, f64(x), type, factor=alpha)])


@draws("transpose_matmul_add")
def _(draw: Draw) -> DrawnCall:
    dy, x, kind = _nt(draw)
    addend, alpha = draw.tensor(dy.shape[1], x.shape[1], type=draw.of(kind, DType.Float32)), draw.of(1.0, 0.5)
    wanted = product(f64(dy).T, f64(x), addend.type, f64(addend), factor=alpha)
    return DrawnCall({"dy": dy, "x": x, "addend": addend, "alpha": alpha}, [wanted])


@draws("transpose_matmul_dbias")
def _(draw: Draw) -> DrawnCall:
    tokens, n, k = _sizes(draw)
    kind = draw.type()
    dy, x, type, dbias_type = draw.tensor(tokens, n, type=kind), draw.tensor(tokens, k, type=kind), draw.type(), draw.type()
    sums = Wanted(f64(dy).sum(0), tokens, f64(dy).abs().sum(0), type=dbias_type, rounded=(type,))
    return DrawnCall({"dy": dy, "x": x, "type": type, "dbias_type": dbias_type}, [product(f64(dy).T, f64(x), type), sums])
