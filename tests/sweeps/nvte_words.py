"""Right calls of every word of nvte, drawn at random: their arguments, and in float64 what must come of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from fusible import nvte
from fusible.nvte import DType, QuantizedType, Tensor, Type

__all__ = ["WORDS", "Draw", "Given", "Wanted", "share"]

FLOATS = (DType.Float32, DType.BFloat16, DType.Float16)
FP8 = (QuantizedType(DType.Float8E4M3, "current"), QuantizedType(DType.Float8E5M2, "current"))
LARGEST = {DType.Float8E4M3: 448.0, DType.Float8E5M2: 57344.0}
EPS = {DType.Float8E4M3: 2.0**-3, DType.Float8E5M2: 2.0**-2}
SMALLEST = {DType.Float8E4M3: 2.0**-9, DType.Float8E5M2: 2.0**-16}


@dataclass(frozen=True)
class Wanted:
    """A value in float64 that is rounded once, after fp32 sums of ``length`` terms, whose absolute values add up to ``magnitude``. One that is
    ``exact`` comes bit by bit. ``rounded``: types in which a value was rounded on the way. ``slack``: what else it may be wrong by."""

    value: torch.Tensor
    length: int = 1
    magnitude: torch.Tensor | None = None
    exact: bool = False
    type: Type | None = None
    rounded: tuple[Type, ...] = ()
    slack: torch.Tensor | float = 0.0


@dataclass(frozen=True)
class Given:
    """A call: the arguments by name, those that have none after the others, and what must come of it (None: anything)."""

    arguments: dict[str, Any]
    wanted: Sequence[Wanted | None] | Callable[[Any], None]
    more: tuple[Any, ...] = field(default=())


class Draw:
    """Random shapes, layouts and values, the same from the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def of(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def rows(self) -> int:
        return self.of(0, 1, 1, 2, 3, 5, 7, 8, 16, 17, 31, 32)

    def columns(self) -> int:
        return self.of(1, 2, 3, 5, 8, 13, 16, 31, 32, 33)

    def type(self) -> DType:
        return self.of(*FLOATS)

    def out(self) -> Type:
        """A type to compute into."""
        return self.of(*FLOATS, *FP8)

    def values(self, *shape: int, type: DType | None = None) -> torch.Tensor:
        """Values whose memory lies in one piece, or within another tensor at an offset, with gaps between columns, or by columns."""
        dtype = nvte.te_to_torch_dtype(self.type() if type is None else type)
        layout = self.of("whole", "whole", "offset", "gaps", "by columns") if shape else "whole"
        if layout == "whole":
            return torch.randn(shape, generator=self.generator).to(dtype)
        if layout == "offset":
            return torch.randn(math.prod(shape) + 3, generator=self.generator).to(dtype)[3:].view(shape)
        if layout == "gaps":
            return torch.randn((*shape[:-1], 2 * shape[-1] + 1), generator=self.generator).to(dtype)[..., 1::2]
        return torch.randn(shape[::-1], generator=self.generator).to(dtype).permute(*reversed(range(len(shape))))

    def tensor(self, *shape: int, type: DType | None = None) -> Tensor:
        return nvte.make_nvte_tensor(self.values(*shape, type=type))


def f64(x: Tensor) -> torch.Tensor:
    """The values of a tensor."""
    if x.type.__class__ is QuantizedType or x.type in LARGEST:
        return nvte.dequantize(x, DType.Float32).data.double()
    return x.data.detach().double()


def share(got: Tensor, wanted: Wanted, type: Type | None) -> float:
    """The largest error as a share of its bound: half a unit in the last place of every type that the value was rounded to, and what sums lose."""
    value, found = wanted.value, f64(got)
    assert found.shape == value.shape, f"{list(found.shape)} instead of {list(value.shape)}"
    if type is not None:
        assert nvte.element(got.type) == nvte.element(type), f"{got.type} instead of {type}"
    if wanted.exact:
        return 0.0 if torch.equal(found, value) else math.inf
    magnitude = value.abs() if wanted.magnitude is None else wanted.magnitude
    bound = (wanted.length + 32) * 2.0**-23 * magnitude + wanted.slack + 1e-40
    for rounding in (got.type, *wanted.rounded):
        bound = bound + _half_unit(nvte.element(rounding), value)
    return ((found - value).abs() / bound).max().item() if value.numel() else 0.0


def _half_unit(dtype: DType, value: torch.Tensor) -> torch.Tensor:
    if dtype in LARGEST:
        amax = value.abs().max() if value.numel() else 0.0
        return 1.01 * (EPS[dtype] / 2 * value.abs() + SMALLEST[dtype] / 2 * amax / LARGEST[dtype])
    info = torch.finfo(nvte.te_to_torch_dtype(dtype))
    return 0.51 * (info.eps * value.abs() + info.smallest_normal * info.eps)


WORDS: dict[str, Callable[[Draw], Given]] = {}
"""By the name of a word what draws a call of it."""


def word(name: str) -> Callable[[Callable[[Draw], Given]], Callable[[Draw], Given]]:
    def enter(draws: Callable[[Draw], Given]) -> Callable[[Draw], Given]:
        assert name not in WORDS, name
        WORDS[name] = draws
        return draws

    return enter


# Activations: each a formula, whose gradient autograd takes.

Formula = Callable[[torch.Tensor], torch.Tensor]


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


PLAIN: dict[str, Formula] = {
    "gelu": _gelu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "silu": F.silu,
    "srelu": lambda x: torch.relu(x).square(),
}
GATES: dict[str, Formula] = {
    "glu": torch.sigmoid,
    "geglu": PLAIN["gelu"],
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


def _near(value: torch.Tensor, *inputs: torch.Tensor, **more: Any) -> Wanted:
    """Of a formula that may cancel: its error is of the size of what goes in."""
    size = max([1.0, *(x.abs().max().item() for x in inputs if x.numel())]) ** 3
    return Wanted(value, 32, torch.full_like(value, size), **more)


def _enter_activation(name: str, backward: str, make: Callable[..., Formula], width: int, options: Sequence[float] = ()) -> None:
    def shapes(draw: Draw) -> tuple[tuple[int, int], tuple[int, int], tuple[float, ...]]:
        rows, columns = draw.rows(), draw.columns()
        return (rows, columns), (rows, width * columns), tuple(options) if draw.of(True, False) else ()

    def forward(draw: Draw) -> Given:
        _, shape, given = shapes(draw)
        x, type = draw.tensor(*shape), draw.out()
        return Given({"x": x, "type": type}, [_near(make(*given)(f64(x)), f64(x), type=type, rounded=(x.type,))], given)

    def back(draw: Draw) -> Given:
        out, shape, given = shapes(draw)
        kind = draw.type()
        dy, x, type = draw.tensor(*out, type=kind), draw.tensor(*shape, type=kind), draw.out()
        (dx,) = gradient(make(*given), f64(dy), f64(x))
        return Given({"dy": dy, "x": x, "type": type}, [_near(dx, f64(x), f64(dy), type=type, rounded=(kind,))], given)

    WORDS[name], WORDS[backward] = forward, back


def _enter_scaled(name: str, backward: str, make: Callable[..., Formula], width: int, options: Sequence[float] = ()) -> None:
    def arguments(draw: Draw) -> tuple[Tensor, Tensor, Tensor, tuple[float, ...]]:
        rows, columns, kind = draw.rows(), draw.columns(), draw.type()
        given = tuple(options) if draw.of(True, False) else ()
        return draw.tensor(rows, columns, type=kind), draw.tensor(rows, width * columns, type=kind), draw.tensor(rows), given

    def forward(draw: Draw) -> Given:
        _, x, scales, given = arguments(draw)
        type = draw.out()
        y = make(*given)(f64(x)) * f64(scales)[:, None]
        return Given({"x": x, "scales": scales, "type": type}, [_near(y, f64(x), f64(scales), type=type, rounded=(x.type,))], given)

    def back(draw: Draw) -> Given:
        dy, x, scales, given = arguments(draw)
        type, wanted = draw.out(), draw.of(True, False)
        formula = make(*given)
        dx, dscales = gradient(lambda x, s: formula(x) * s[:, None], f64(dy), f64(x), f64(scales))  # type: ignore[misc]
        sizes = (f64(x), f64(dy), f64(scales))
        per_row = _near(dscales, *sizes)
        per_row = Wanted(dscales, dy.shape[1], per_row.magnitude * max(1, dy.shape[1]), type=scales.type)  # type: ignore[operator]
        call = {"dy": dy, "x": x, "scales": scales, "type": type, "scales_gradient": wanted}
        return Given(call, [_near(dx, *sizes, type=type, rounded=(x.type,)), per_row if wanted else None], given)

    WORDS[name], WORDS[backward] = forward, back


def _enter_dbias(name: str, formula: Formula) -> None:
    def back(draw: Draw) -> Given:
        kind = draw.type()
        shape, type, dbias_type = (draw.rows(), draw.columns()), draw.out(), draw.type()
        dy, x = draw.tensor(*shape, type=kind), draw.tensor(*shape, type=kind)
        (dx,) = gradient(formula, f64(dy), f64(x))
        near = _near(dx, f64(x), f64(dy), type=type, rounded=(kind,))
        sums = Wanted(dx.sum(0), 32 * shape[0], near.magnitude.sum(0), type=dbias_type, rounded=(kind,))  # type: ignore[union-attr]
        return Given({"dy": dy, "x": x, "type": type, "dbias_type": dbias_type}, [near, sums])

    WORDS[f"dbias_d{name}"] = back


for _name, _formula in PLAIN.items():
    _enter_activation(_name, f"d{_name}", lambda f=_formula: f, 1)
    _enter_dbias(_name, _formula)
for _name, _formula in GATES.items():
    _enter_activation(_name, f"d{_name}", lambda f=_formula: _gated(f), 2)
_enter_activation("situglu", "dsituglu", _situglu, 2, (3.0, 10.0))
_enter_activation("clamped_swiglu", "clamped_dswiglu", _clamped, 2, (1.5, 1.0, 0.5))
_enter_scaled("scaled_srelu", "scaled_dsrelu", lambda: PLAIN["srelu"], 1)
_enter_scaled("scaled_swiglu", "scaled_dswiglu", lambda: _gated(F.silu), 2)
_enter_scaled("scaled_situglu", "scaled_dsituglu", _situglu, 2)
_enter_scaled("scaled_clamped_swiglu", "scaled_clamped_dswiglu", _clamped, 2)


@word("cast_transpose_dbias_dgelu_checked")
def _(draw: Draw) -> Given:
    given = WORDS["dbias_dgelu"](draw)
    dx, dbias = given.wanted  # type: ignore[misc]
    return Given(given.arguments, [dx, _transposed(dx), dbias])


@word("cast_transpose_dgeglu_checked")
def _(draw: Draw) -> Given:
    given = WORDS["dgeglu"](draw)
    return Given(given.arguments, [given.wanted[0], _transposed(given.wanted[0])])  # type: ignore[index]


def _transposed(wanted: Any) -> Wanted:
    magnitude = None if wanted.magnitude is None else wanted.magnitude.T
    return Wanted(wanted.value.T, wanted.length, magnitude, wanted.exact, wanted.type, wanted.rounded)


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


@word("matmul_transpose")
def _(draw: Draw) -> Given:
    arguments, x, w, _ = _tn(draw)
    type = draw.out()
    return Given({**arguments, "type": type}, [product(x, w, type)])


@word("matmul_transpose_add")
def _(draw: Draw) -> Given:
    arguments, x, w, _ = _tn(draw, "bias")
    type = draw.out()
    return Given({**arguments, "type": type}, [product(x, w, type, f64(arguments["bias"]))])


@word("matmul_transpose_add_add")
def _(draw: Draw) -> Given:
    arguments, x, w, _ = _tn(draw, "bias", "residual")
    type, alpha = draw.of(*FLOATS), draw.of(1.0, 0.5, -2.0)
    more = [f64(arguments["bias"]), f64(arguments["residual"])]
    if draw.of(True, False):
        arguments["bias"] = None
        more = more[1:]
    # What is added to lies in the type of the result.
    return Given({**arguments, "type": type, "alpha": alpha}, [product(x, w, type, *more, factor=alpha, slack=_half_unit(type, more[-1]))])


def _through_gelu(draw: Draw, *more: str) -> Given:
    arguments, x, w, kind = _tn(draw, *more)
    type, pre_type = draw.out(), kind
    first = () if "addend" in more or type in FP8 else (type,)
    z = product(x, w, pre_type, *[f64(arguments[name]) for name in more if name == "bias"], rounded=first)
    value = _gelu(z.value)
    rounded = (pre_type,)
    if "addend" in more:
        value, rounded = value + f64(arguments["addend"]), (pre_type, pre_type)
    size = z.magnitude + _half_unit(pre_type, z.value) * 2**23 + value.abs() + (f64(arguments["addend"]).abs() if "addend" in more else 0)  # type: ignore[operator]
    y = Wanted(value, z.length, size * 1.2, type=type, rounded=rounded)
    return Given({**arguments, "type": type, "pre_type": pre_type}, [y, z])


WORDS["matmul_transpose_gelu"] = lambda draw: _through_gelu(draw)
WORDS["matmul_transpose_add_gelu"] = lambda draw: _through_gelu(draw, "bias")
WORDS["matmul_transpose_gelu_add"] = lambda draw: _through_gelu(draw, "addend")
WORDS["matmul_transpose_add_gelu_add"] = lambda draw: _through_gelu(draw, "bias", "addend")


def _nn(draw: Draw) -> tuple[Tensor, Tensor, DType]:
    tokens, n, k = _sizes(draw)
    kind = draw.type()
    return _operand(draw, tokens, n, type=kind), _operand(draw, n, k, type=kind), kind


@word("matmul")
def _(draw: Draw) -> Given:
    dy, weight, _ = _nn(draw)
    type, alpha = draw.out(), draw.of(1.0, 0.25)
    return Given({"dy": dy, "weight": weight, "type": type, "alpha": alpha}, [product(f64(dy), f64(weight), type, factor=alpha)])


@word("matmul_add")
def _(draw: Draw) -> Given:
    dy, weight, kind = _nn(draw)
    type, addend = draw.of(*FLOATS), draw.tensor(dy.shape[0], weight.shape[1], type=kind)
    wanted = product(f64(dy), f64(weight), type, f64(addend), slack=_half_unit(type, f64(addend)))
    return Given({"dy": dy, "weight": weight, "addend": addend, "type": type}, [wanted])


def _dgelu(draw: Draw) -> tuple[dict[str, Any], Wanted, Type]:
    dy, weight, kind = _nn(draw)
    pre, type = draw.tensor(dy.shape[0], weight.shape[1], type=kind), draw.out()
    d = product(f64(dy), f64(weight), type)
    slope = gradient(_gelu, torch.ones_like(d.value), f64(pre))[0]
    size = (d.magnitude + d.value.abs()) * (slope.abs() + 1)  # type: ignore[operator]
    return {"dy": dy, "weight": weight, "pre": pre, "type": type}, Wanted(d.value * slope, d.length, size, type=type), type


@word("matmul_dgelu")
def _(draw: Draw) -> Given:
    arguments, d, _ = _dgelu(draw)
    return Given(arguments, [d])


@word("matmul_dbias_dgelu")
def _(draw: Draw) -> Given:
    arguments, d, _ = _dgelu(draw)
    kind, dbias_type = arguments["pre"].type, draw.type()
    sums = Wanted(d.value.sum(0), d.length + d.value.shape[0], d.magnitude.sum(0), type=dbias_type, rounded=(kind, arguments["type"]))  # type: ignore[union-attr]
    return Given({**arguments, "dbias_type": dbias_type}, [d, sums])


def _nt(draw: Draw) -> tuple[Tensor, Tensor, DType]:
    tokens, n, k = _sizes(draw)
    kind = draw.type()
    return _operand(draw, tokens, n, type=kind), _operand(draw, tokens, k, type=kind), kind


@word("transpose_matmul")
def _(draw: Draw) -> Given:
    dy, x, _ = _nt(draw)
    type, alpha = draw.out(), draw.of(1.0, 0.25)
    return Given({"dy": dy, "x": x, "type": type, "alpha": alpha}, [product(f64(dy).T, f64(x), type, factor=alpha)])


@word("transpose_matmul_add")
def _(draw: Draw) -> Given:
    dy, x, kind = _nt(draw)
    addend, alpha = draw.tensor(dy.shape[1], x.shape[1], type=draw.of(kind, DType.Float32)), draw.of(1.0, 0.5)
    wanted = product(f64(dy).T, f64(x), addend.type, f64(addend), factor=alpha)
    return Given({"dy": dy, "x": x, "addend": addend, "alpha": alpha}, [wanted])


@word("transpose_matmul_dbias")
def _(draw: Draw) -> Given:
    tokens, n, k = _sizes(draw)
    kind = draw.type()
    dy, x, type, dbias_type = draw.tensor(tokens, n, type=kind), draw.tensor(tokens, k, type=kind), draw.type(), draw.type()
    sums = Wanted(f64(dy).sum(0), tokens, f64(dy).abs().sum(0), type=dbias_type, rounded=(type,))
    return Given({"dy": dy, "x": x, "type": type, "dbias_type": dbias_type}, [product(f64(dy).T, f64(x), type), sums])


# Sums, copies, the order of columns.


@word("add")
def _(draw: Draw) -> Given:
    rows, columns, type = draw.rows(), draw.columns(), draw.out()
    a, b = draw.tensor(rows, columns), draw.tensor(*draw.of((rows, columns), (columns,), (1, columns)))
    return Given({"a": a, "b": b, "type": type}, [Wanted(f64(a) + f64(b), 1, f64(a).abs() + f64(b).abs(), type=type)])


@word("scale")
def _(draw: Draw) -> Given:
    x, factor, type = draw.tensor(draw.rows(), draw.columns()), draw.of(0.0, 1.0, -2.5, 1e-3), draw.out()
    return Given({"x": x, "factor": factor, "type": type}, [Wanted(f64(x) * factor, type=type)])


@word("copy")
def _(draw: Draw) -> Given:
    x = draw.tensor(draw.rows(), draw.columns())
    return Given({"x": x}, [Wanted(f64(x), exact=True, type=x.type)])


@word("dbias")
def _(draw: Draw) -> Given:
    dy, type = draw.tensor(draw.rows(), draw.columns()), draw.type()
    return Given({"dy": dy, "type": type}, [Wanted(f64(dy).sum(0), dy.shape[0], f64(dy).abs().sum(0), type=type)])


@word("reshape")
def _(draw: Draw) -> Given:
    a, b, columns = draw.rows(), draw.of(1, 2, 3), draw.columns()
    x = draw.tensor(a * b, columns)
    if draw.of(True, False):
        x = nvte.cast(x, FP8[0])
    return Given({"x": x, "shape": (a, b, columns)}, [Wanted(f64(x).reshape(a, b, columns), exact=True, type=x.type)])


def _blocks(x: torch.Tensor, outer: int, inner: int, size: int) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], outer, inner, size).transpose(-3, -2).reshape(x.shape)


@word("interleave")
def _(draw: Draw) -> Given:
    size, count = draw.of(1, 2, 8), draw.of(1, 2, 3)
    x = draw.tensor(draw.rows(), 2 * size * count)
    return Given({"x": x, "size": size}, [Wanted(_blocks(f64(x), 2, count, size), exact=True, type=x.type)])


@word("deinterleave")
def _(draw: Draw) -> Given:
    size, count = draw.of(1, 2, 8), draw.of(1, 2, 3)
    x = draw.tensor(draw.rows(), 2 * size * count)
    return Given({"x": x, "size": size}, [Wanted(_blocks(f64(x), count, 2, size), exact=True, type=x.type)])


@word("split")
def _(draw: Draw) -> Given:
    dim, sizes = draw.of(0, 1), [draw.of(0, 1, 2, 5), draw.of(1, 3), draw.of(0, 2)]
    x = draw.tensor(*((sum(sizes), draw.columns()) if dim == 0 else (draw.rows(), sum(sizes))))
    return Given({"x": x, "sizes": sizes, "dim": dim}, [Wanted(part, exact=True, type=x.type) for part in f64(x).split(sizes, dim)])


@word("concatenate")
def _(draw: Draw) -> Given:
    dim, kind, other = draw.of(0, 1), draw.type(), draw.columns()
    sizes = [draw.of(0, 1, 2, 5) for _ in range(draw.of(1, 2, 3))]
    xs = [draw.tensor(*((size, other) if dim == 0 else (other, size)), type=kind) for size in sizes]
    return Given({"xs": xs, "dim": dim}, [Wanted(torch.cat([f64(x) for x in xs], dim), exact=True, type=kind)])


@word("stack")
def _(draw: Draw) -> Given:
    shape, kind = (draw.rows(), draw.columns()), draw.type()
    tensors = [draw.tensor(*shape, type=kind) for _ in range(draw.of(1, 2, 3))]
    return Given({"tensors": tensors}, [Wanted(torch.stack([f64(x) for x in tensors]), exact=True, type=kind)])


@word("unstack")
def _(draw: Draw) -> Given:
    x = draw.tensor(draw.of(1, 2, 3), draw.rows(), draw.columns())
    return Given({"x": x}, [Wanted(part, exact=True, type=x.type) for part in f64(x)])


@word("zeros")
def _(draw: Draw) -> Given:
    shape, type = (draw.rows(), draw.columns()), draw.type()
    return Given({"shape": shape, "type": type, "like": draw.tensor(2)}, [Wanted(torch.zeros(shape).double(), exact=True, type=type)])


def _of_shape(shape: tuple[int, ...], type: Type) -> Callable[[Any], None]:
    def check(found: Any) -> None:
        for x in found if isinstance(found, list) else [found]:
            assert x.shape == shape and nvte.element(x.type) == nvte.element(type)

    return check


@word("empty")
def _(draw: Draw) -> Given:
    shape, type = (draw.rows(), draw.columns()), draw.out()
    return Given({"shape": shape, "type": type, "like": draw.tensor(2)}, _of_shape(shape, type))


@word("empty_like")
def _(draw: Draw) -> Given:
    x = draw.tensor(draw.rows(), draw.columns())
    return Given({"x": x}, _of_shape(x.shape, x.type))


@word("multi_empty_share_metadata")
def _(draw: Draw) -> Given:
    shape, type = (draw.rows(), draw.columns()), draw.out()
    return Given({"type": type, "like": draw.tensor(2)}, _of_shape(shape, type), (shape, shape))


# Casts.


def _exact(x: Tensor, type: Type) -> Wanted:
    return Wanted(f64(x), type=type)


@word("cast")
def _(draw: Draw) -> Given:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.out()
    return Given({"x": x, "type": type}, [_exact(x, type)])


@word("cast_checked")
def _(draw: Draw) -> Given:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.of(None, draw.out())
    return Given({"x": x, "type": type}, [_exact(x, x.type if type is None else type)])


@word("quantize")
def _(draw: Draw) -> Given:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.of(*FP8)
    return Given({"x": x, "type": type}, [_exact(x, type), None])


@word("dequantize")
def _(draw: Draw) -> Given:
    x, dtype = nvte.cast(draw.tensor(draw.rows(), draw.columns()), draw.of(*FP8)), draw.type()
    return Given({"x": x, "dtype": dtype}, [_exact(x, dtype)])


@word("plain")
def _(draw: Draw) -> Given:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.type()
    return Given({"data": x.data, "type": type}, [_exact(x, type)])


@word("emit")
def _(draw: Draw) -> Given:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.type()
    return Given({"data": x.data, "type": type, "quantizer": None}, [_exact(x, type)])


@word("by_columns")
def _(draw: Draw) -> Given:
    x = nvte.cast(draw.tensor(draw.rows(), draw.columns()), draw.of(*FP8))
    return Given({"x": x}, [Wanted(f64(x), exact=True, type=x.type)])


@word("transpose")
def _(draw: Draw) -> Given:
    x = draw.tensor(draw.rows(), draw.columns())
    if draw.of(True, False):
        x = nvte.cast(x, draw.of(*FP8))
    return Given({"x": x}, [Wanted(f64(x).T, exact=True, type=x.type)])


def _both(x: Tensor, type: Type) -> list[Wanted]:
    wanted = _exact(x, type)
    return [wanted, _transposed(wanted)]


@word("cast_transpose")
def _(draw: Draw) -> Given:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.out()
    return Given({"x": x, "type": type}, _both(x, type))


@word("cast_transpose_checked")
def _(draw: Draw) -> Given:
    x, type = draw.tensor(draw.rows(), draw.columns()), draw.of(None, draw.out())
    return Given({"x": x, "type": type}, _both(x, x.type if type is None else type))


@word("multi_cast_transpose")
def _(draw: Draw) -> Given:
    xs = [draw.tensor(draw.rows(), draw.columns()) for _ in range(2)]
    types = [draw.out() for _ in xs]
    return Given({"xs": xs, "types": types}, [w for x, type in zip(xs, types, strict=True) for w in _both(x, type)])


@word("multi_cast_transpose_checked")
def _(draw: Draw) -> Given:
    return WORDS["multi_cast_transpose"](draw)


@word("bgrad_cast")
def _(draw: Draw) -> Given:
    dy, type, dbias_type = draw.tensor(draw.rows(), draw.columns()), draw.out(), draw.type()
    sums = Wanted(f64(dy).sum(0), dy.shape[0], f64(dy).abs().sum(0), type=dbias_type, rounded=(dy.type,))
    return Given({"dy": dy, "type": type, "dbias_type": dbias_type}, [_exact(dy, type), sums])


@word("cast_transpose_dbias_checked")
def _(draw: Draw) -> Given:
    given = WORDS["bgrad_cast"](draw)
    y, sums = given.wanted  # type: ignore[misc]
    return Given(given.arguments, [y, _transposed(y), sums])


@word("make_nvte_tensor")
def _(draw: Draw) -> Given:
    x = draw.tensor(draw.rows(), draw.columns())
    return Given({"data": x.data}, [Wanted(f64(x), exact=True, type=x.type)])


@word("rescale")
def _(draw: Draw) -> Given:
    x, exponent = nvte.cast(draw.tensor(draw.rows(), draw.columns()), draw.of(*FP8)), draw.of(-3, 0, 1, 5)
    return Given({"x": x, "exponent": exponent}, [Wanted(f64(x) * 2.0**exponent, exact=True, type=x.type)])


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


@word("layernorm")
def _(draw: Draw) -> Given:
    arguments, gamma = _norm(draw, bias=True)
    x, type = f64(arguments["x"]), draw.out()
    mu, rsigma = _statistics(x, arguments["eps"], centered=True)
    hat = (x - mu[:, None]) * rsigma[:, None]
    y, worst = hat * gamma + f64(arguments["bias"]), rsigma.amax() ** 3 + 1 if rsigma.numel() else 1.0
    wanted = [
        _loose(y, x, worst * (1 + gamma.abs().amax()), type=type), _loose(mu, x, 1.0, type=DType.Float32),
        _loose(rsigma, x, worst, type=DType.Float32),
    ]  # fmt: skip
    return Given({**arguments, "type": type}, wanted)


@word("rmsnorm")
def _(draw: Draw) -> Given:
    arguments, gamma = _norm(draw, bias=False)
    x, type = f64(arguments["x"]), draw.out()
    _, rsigma = _statistics(x, arguments["eps"], centered=False)
    worst = rsigma.amax() ** 3 + 1 if rsigma.numel() else 1.0
    y = _loose(x * rsigma[:, None] * gamma, x, worst * (1 + gamma.abs().amax()), type=type)
    return Given({**arguments, "type": type}, [y, _loose(rsigma, x, worst, type=DType.Float32)])


@word("l2norm")
def _(draw: Draw) -> Given:
    x, type, eps = draw.tensor(draw.rows(), draw.columns()), draw.out(), draw.of(1e-5, 1e-2)
    values = f64(x)
    return Given({"x": x, "eps": eps, "type": type}, [Wanted(values * (values.square().sum(-1) + eps).rsqrt()[:, None], x.shape[1], type=type), None])


def _backward(draw: Draw, *, centered: bool, add: bool) -> Given:
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
    return Given({**call, "type": type}, wanted)


def _fp32(x: torch.Tensor) -> Tensor:
    return nvte.make_nvte_tensor(x.float())


WORDS["dlayernorm"] = lambda draw: _backward(draw, centered=True, add=False)
WORDS["dlayernorm_add"] = lambda draw: _backward(draw, centered=True, add=True)
WORDS["drmsnorm"] = lambda draw: _backward(draw, centered=False, add=False)
WORDS["drmsnorm_add"] = lambda draw: _backward(draw, centered=False, add=True)


@word("dl2norm")
def _(draw: Draw) -> Given:
    x, eps = draw.tensor(draw.rows(), draw.columns()), 1e-2
    dy, type = draw.tensor(*x.shape, type=x.type), draw.type()  # type: ignore[arg-type]
    values, n = f64(x), x.shape[1]
    (dx,) = gradient(lambda v: v * (v.square().sum(-1, keepdim=True) + eps).rsqrt(), f64(dy), values)
    rsigma = (values.square().mean(-1) + eps / n).rsqrt()
    factor = (1 + f64(dy).abs().amax()) * (1 + rsigma.amax()) ** 3 * n if x.data.numel() else 1.0
    return Given({"dy": dy, "x": x, "rsigma": _fp32(rsigma), "type": type}, [_loose(dx, values, factor, type=type, rounded=(x.type,))])


# Dropout.


@word("dropout")
def _(draw: Draw) -> Given:
    x, p, type = draw.tensor(draw.rows(), draw.columns()), draw.of(0.0, 0.25, 0.9), draw.type()
    values = f64(x)

    def check(found: Any) -> None:
        y, mask = found
        kept = mask.data.double()
        assert set(kept.unique().tolist()) <= {0.0, 1.0} and mask.shape == x.shape
        assert share(y, Wanted(values * kept / (1 - p), rounded=(x.type,)), type) <= 1
        assert p or kept.all()

    seed = nvte.make_nvte_tensor(torch.tensor([draw.random.randrange(2**40)]))
    return Given({"x": x, "probability": p, "seed": seed, "offset": draw.of(0, 7), "type": type}, check)


@word("ddropout")
def _(draw: Draw) -> Given:
    dy, p, type = draw.tensor(draw.rows(), draw.columns()), draw.of(0.0, 0.25), draw.type()
    mask = nvte.make_nvte_tensor((torch.rand(dy.shape, generator=draw.generator) < 0.5).to(torch.uint8))
    wanted = Wanted(f64(dy) * f64(mask) / (1 - p), type=type, rounded=(dy.type,))
    return Given({"dy": dy, "mask": mask, "probability": p, "type": type}, [wanted])


# Attention.


def _sequences(draw: Draw) -> tuple[nvte.Sequences, list[int]]:
    if draw.of(True, False):
        count, length = draw.of(1, 2, 3), draw.of(1, 2, 5)
        cu, lengths = torch.arange(count + 1, dtype=torch.int32) * length, [length] * count
        return nvte.Sequences(nvte.make_nvte_tensor(cu), count, length, True), lengths
    lengths = [draw.of(0, 1, 3, 5) for _ in range(draw.of(1, 2, 3))]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return nvte.Sequences(nvte.make_nvte_tensor(cu), len(lengths), max(*lengths, 1), False), lengths


def _rotated(x: torch.Tensor, lengths: Sequence[int], base: float, sign: float = 1.0) -> torch.Tensor:
    width = x.shape[-1]
    positions = torch.cat([torch.arange(length) for length in lengths]).double()
    inverse = base ** (-torch.arange(0, width, 2).double() / width)
    angle = torch.cat([positions[:, None] * inverse] * 2, -1)[:, None, :]
    half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return x * angle.cos() + sign * half * angle.sin()


def _rope(draw: Draw, name: str, sign: float) -> Given:
    sequences, lengths = _sequences(draw)
    x, base = draw.tensor(sum(lengths), draw.of(1, 2), draw.of(2, 4, 8)), draw.of(10000.0, 100.0)
    value = _rotated(f64(x), lengths, base, sign)
    return Given({name: x, "sequences": sequences, "base": base}, [_near(value, f64(x), type=x.type)])


WORDS["rope"] = lambda draw: _rope(draw, "x", 1.0)
WORDS["drope"] = lambda draw: _rope(draw, "dy", -1.0)


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], scale: float, causal: bool) -> torch.Tensor:
    parts = []
    for q_, k_, v_ in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True):
        k_, v_ = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k_, v_))
        scores = torch.einsum("qhd,khd->hqk", q_, k_) * scale
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v_))
    return torch.cat(parts)


def _heads(draw: Draw) -> tuple[dict[str, Any], list[int]]:
    sequences, lengths = _sequences(draw)
    groups, width, kind = draw.of(1, 2), draw.of(4, 8), draw.type()
    heads = groups * draw.of(1, 2)
    q, k, v = (draw.tensor(sum(lengths), n, width, type=kind) for n in (heads, groups, groups))
    return {"q": q, "k": k, "v": v, "sequences": sequences, "scale": width**-0.5, "causal": draw.of(True, False)}, lengths


def _probabilities(kind: DType, v: torch.Tensor) -> float:
    """What rounding probabilities, which are at most 1, to the type of the operands may cost: a backend may do that."""
    return torch.finfo(nvte.te_to_torch_dtype(kind)).eps * (v.abs().max().item() if v.numel() else 0.0)


@word("attention")
def _(draw: Draw) -> Given:
    arguments, lengths = _heads(draw)
    q, k, v = (f64(arguments[name]) for name in "qkv")
    kind = arguments["q"].type
    o = _near(_attended(q, k, v, lengths, arguments["scale"], arguments["causal"]), q, k, v, type=kind, slack=_probabilities(kind, v))

    def check(found: Any) -> None:
        assert share(found[0], o, o.type) <= 1

    return Given({**arguments, "is_training": draw.of(True, False)}, check)


@word("dattention")
def _(draw: Draw) -> Given:
    arguments, lengths = _heads(draw)
    q, k, v = (f64(arguments[name]) for name in "qkv")
    scale, causal, kind = arguments["scale"], arguments["causal"], arguments["q"].type
    o, aux = nvte.attention(**arguments, is_training=True)
    do = draw.tensor(*o.shape, type=kind)
    grads = gradient(lambda q, k, v: _attended(q, k, v, lengths, scale, causal), f64(do), q, k, v)  # type: ignore[misc, arg-type]
    size = [8 * q, k, v, f64(do)]
    # o and the probabilities are rounded to their dtype on the way, and several of them are added up.
    eps = torch.finfo(nvte.te_to_torch_dtype(kind)).eps
    wanted = [Wanted(g, 32, (_near(g, *size).magnitude * (1 + eps * 2**23 / 16)), type=kind) for g in grads]  # type: ignore[operator]
    return Given({"do": do, "q": arguments["q"], "k": arguments["k"], "v": arguments["v"], "o": o, "aux": aux, "sequences": arguments["sequences"],
                  "scale": scale, "causal": causal}, wanted)  # fmt: skip


def _cache(draw: Draw, groups: int, width: int, kind: DType) -> tuple[nvte.KVCache, nvte.Sequences, list[int], list[int]]:
    lengths, starts = [draw.of(1, 2, 3), draw.of(1, 3)], [draw.of(0, 2), draw.of(0, 1, 4)]
    pages = [nvte.make_nvte_tensor(torch.randn(8, 2, groups, width, generator=draw.generator).to(nvte.te_to_torch_dtype(kind))) for _ in "kv"]
    table = nvte.make_nvte_tensor(torch.tensor([[3, 1, 6, 0], [2, 7, 5, 4]], dtype=torch.int32))
    ends = [a + b for a, b in zip(lengths, starts, strict=True)]
    cu_lengths = torch.tensor([0, ends[0], sum(ends)], dtype=torch.int32)
    cache = nvte.KVCache(*pages, table, nvte.make_nvte_tensor(torch.tensor(starts, dtype=torch.int32)), nvte.make_nvte_tensor(cu_lengths))
    cu = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
    return cache, nvte.Sequences(nvte.make_nvte_tensor(cu), 2, max(lengths), False), lengths, starts


def _held(pages: Tensor, cache: nvte.KVCache, sequence: int, count: int) -> torch.Tensor:
    table = cache.page_table.data[sequence]
    return torch.cat([f64(pages)[page] for page in table.tolist()])[:count] if count else f64(pages)[0][:0]


@word("append_kv")
def _(draw: Draw) -> Given:
    groups, width, kind = draw.of(1, 2), draw.of(4, 8), draw.type()
    cache, sequences, lengths, starts = _cache(draw, groups, width, kind)
    k, v = (draw.tensor(sum(lengths), groups, width, type=kind) for _ in "kv")
    before = [[_held(pages, cache, i, starts[i]) for i in range(2)] for pages in (cache.k, cache.v)]

    def check(found: Any) -> None:
        for pages, new, held in ((found.k, k, before[0]), (found.v, v, before[1])):
            for i, part in enumerate(f64(new).split(lengths)):
                assert torch.equal(_held(pages, found, i, starts[i] + lengths[i]), torch.cat([held[i], part]))

    return Given({"cache": cache, "k": k, "v": v, "sequences": sequences}, check)


@word("attention_cached")
def _(draw: Draw) -> Given:
    groups, width, kind = draw.of(1, 2), draw.of(4, 8), draw.type()
    cache, sequences, lengths, starts = _cache(draw, groups, width, kind)
    q, scale = draw.tensor(sum(lengths), groups * draw.of(1, 2), width, type=kind), width**-0.5
    parts = []
    for i, part in enumerate(f64(q).split(lengths)):
        ends = starts[i] + lengths[i]
        k, v = (_held(pages, cache, i, ends).repeat_interleave(q.shape[1] // groups, 1) for pages in (cache.k, cache.v))
        scores = torch.einsum("qhd,khd->hqk", part, k) * scale
        scores = scores.masked_fill(torch.ones(lengths[i], ends).triu(starts[i] + 1).bool(), -torch.inf)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    values = f64(cache.v)
    wanted = _near(torch.cat(parts), f64(q), f64(cache.k), values, type=kind, slack=_probabilities(kind, values))
    return Given({"q": q, "cache": cache, "sequences": sequences, "scale": scale}, [wanted])


# Groups.


def _groups(draw: Draw, whole: int = 1) -> tuple[Tensor, list[int]]:
    sizes = [whole * draw.of(0, 1, 2, 3, 8) for _ in range(draw.of(1, 2, 3))]
    return nvte.make_nvte_tensor(torch.tensor(sizes, dtype=draw.of(torch.int32, torch.int64))), sizes


def _padded(parts: Sequence[torch.Tensor], multiple: int) -> torch.Tensor:
    return torch.cat([F.pad(part, (0, 0, 0, -len(part) % multiple)) for part in parts])


@word("grouped_pad")
def _(draw: Draw) -> Given:
    sizes, counts = _groups(draw)
    x, multiple = draw.tensor(sum(counts), draw.columns()), draw.of(1, 4, 16)
    wanted = _padded(f64(x).split(counts), multiple)

    def check(found: Any) -> None:
        padded, padded_sizes = found
        assert torch.equal(f64(padded)[: len(wanted)], wanted) and not f64(padded)[len(wanted) :].any()
        assert padded_sizes.data.tolist() == [count + -count % multiple for count in counts]

    return Given({"x": x, "sizes": sizes, "multiple": multiple}, check)


@word("grouped_unpad")
def _(draw: Draw) -> Given:
    sizes, counts = _groups(draw)
    multiple = draw.of(1, 4, 16)
    x = draw.tensor(sum(count + -count % multiple for count in counts), draw.columns())
    parts = f64(x).split([count + -count % multiple for count in counts])
    value = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    return Given({"x": x, "sizes": sizes, "multiple": multiple, "rows": sum(counts)}, [Wanted(value, exact=True, type=x.type)])


def _members(x: Tensor, counts: Sequence[int], columns: int) -> list[torch.Tensor]:
    """The values of a grouped tensor, group by group."""
    held = x.data
    if nvte.is_quantized_type(x.type):
        return [f64(Tensor(part, x.type)) for part in held.split_into_quantized_tensors()]
    flat = held.rowwise_data.double()
    return list(flat[: sum(counts) * columns].view(-1, columns).split(list(counts)))


@word("grouped_cast")
def _(draw: Draw) -> Given:
    sizes, counts = _groups(draw)
    x, type = draw.tensor(sum(counts), draw.columns()), draw.of(*FLOATS)

    def check(found: Any) -> None:
        for part, got in zip(f64(x).split(counts), _members(found, counts, x.shape[1]), strict=True):
            assert share(nvte.make_nvte_tensor(got.float()), Wanted(part, rounded=(type,)), None) <= 1

    return Given({"x": x, "sizes": sizes, "types": [type] * len(counts)}, check)


@word("grouped_bgrad_cast")
def _(draw: Draw) -> Given:
    sizes, counts = _groups(draw)
    dy, type, dbias_type = draw.tensor(sum(counts), draw.columns()), draw.of(*FLOATS), draw.type()
    parts = f64(dy).split(counts)
    rounded = (dy.type,)
    sums = Wanted(torch.stack([p.sum(0) for p in parts]), sum(counts), torch.stack([p.abs().sum(0) for p in parts]), type=dbias_type, rounded=rounded)

    def check(found: Any) -> None:
        for part, got in zip(parts, _members(found[0], counts, dy.shape[1]), strict=True):
            assert share(nvte.make_nvte_tensor(got.float()), Wanted(part, rounded=(type,)), None) <= 1
        assert share(found[1], sums, dbias_type) <= 1

    return Given({"dy": dy, "sizes": sizes, "types": [type] * len(counts), "dbias_type": dbias_type}, check)


@word("grouped_cast_stack")
def _(draw: Draw) -> Given:
    groups, rows, columns = draw.of(1, 2, 3), 8 * draw.of(1, 2), 16 * draw.of(1, 2)
    x = draw.tensor(groups, rows, columns)

    def check(found: Any) -> None:
        for part, got in zip(f64(x), _members(found, [rows] * groups, columns), strict=True):
            assert share(nvte.make_nvte_tensor(got.float()), Wanted(part, rounded=(FP8[0],)), None) <= 1

    return Given({"x": x, "types": [FP8[0]] * groups}, check)


def _experts(draw: Draw, kind: DType) -> tuple[Tensor, list[int], list[Tensor]]:
    sizes, counts = _groups(draw)
    n, k = draw.columns(), draw.columns()
    return sizes, counts, [draw.tensor(n, k, type=kind) for _ in counts]


def _by_group(parts: Sequence[torch.Tensor], matrices: Sequence[torch.Tensor], more: Sequence[torch.Tensor] | None = None, **options: Any) -> Wanted:
    products = [product(a, b, None) for a, b in zip(parts, matrices, strict=True)]
    values, sizes = [p.value for p in products], [p.magnitude for p in products]
    if more is not None:
        values, sizes = [v + m for v, m in zip(values, more, strict=True)], [s + m.abs() for s, m in zip(sizes, more, strict=True)]  # type: ignore[operator]
    join = torch.cat if options.pop("side_by_side", True) else torch.stack
    return Wanted(join(values), max([1, *(p.shape[1] for p in parts)]), join(sizes), **options)  # type: ignore[arg-type]


@word("grouped_matmul_transpose")
def _(draw: Draw) -> Given:
    kind, type = draw.type(), draw.type()
    sizes, counts, weights = _experts(draw, kind)
    n, k = weights[0].shape
    x = draw.tensor(sum(counts), k, type=kind)
    bias = draw.tensor(len(counts), n, type=type) if draw.of(True, False) else None
    scale = draw.tensor(sum(counts)) if bias is not None and draw.of(True, False) else None
    more = None
    if bias is not None:
        factors = (torch.ones(sum(counts)).double() if scale is None else f64(scale)).split(counts)
        more = [f[:, None] * b for f, b in zip(factors, f64(bias), strict=True)]
    wanted = _by_group(f64(x).split(counts), [f64(w).T for w in weights], more, type=type)
    call = {"x": nvte.grouped_cast(x, sizes, [kind] * len(counts)), "weights": weights, "type": type, "bias": bias, "bias_scale": scale}
    return Given(call, [wanted])


@word("grouped_matmul")
def _(draw: Draw) -> Given:
    kind, type = draw.type(), draw.type()
    sizes, counts, weights = _experts(draw, kind)
    dy = draw.tensor(sum(counts), weights[0].shape[0], type=kind)
    wanted = _by_group(f64(dy).split(counts), [f64(w) for w in weights], type=type)
    return Given({"dy": nvte.grouped_cast(dy, sizes, [kind] * len(counts)), "weights": weights, "type": type}, [wanted])


def _wgrad(draw: Draw) -> tuple[Tensor, Tensor, list[torch.Tensor], list[torch.Tensor], DType]:
    kind = draw.type()
    sizes, counts = _groups(draw)
    dy, x = draw.tensor(sum(counts), draw.columns(), type=kind), draw.tensor(sum(counts), draw.columns(), type=kind)
    types = [kind] * len(counts)
    parts = [p.T for p in f64(dy).split(counts)], list(f64(x).split(counts))
    return nvte.grouped_cast(dy, sizes, types), nvte.grouped_cast(x, sizes, types), *parts, kind


@word("grouped_transpose_matmul")
def _(draw: Draw) -> Given:
    dy, x, a, b, _ = _wgrad(draw)
    type = draw.type()
    return Given({"dy": dy, "x": x, "type": type}, [_by_group(a, b, type=type, side_by_side=False)])


@word("grouped_transpose_matmul_add")
def _(draw: Draw) -> Given:
    dy, x, a, b, kind = _wgrad(draw)
    addends = [nvte.copy(draw.tensor(dy.shape[1], x.shape[1], type=kind)) for _ in a]
    wanted = [product(p, q, kind, f64(c)) for p, q, c in zip(a, b, addends, strict=True)]
    return Given({"dy": dy, "x": x, "addends": addends}, wanted)


@word("grouped_transpose_matmul_add_whole")
def _(draw: Draw) -> Given:
    dy, x, a, b, kind = _wgrad(draw)
    addend = nvte.copy(draw.tensor(len(a), dy.shape[1], x.shape[1], type=kind))
    return Given({"dy": dy, "x": x, "addend": addend}, [_by_group(a, b, list(f64(addend)), type=kind, side_by_side=False)])


@word("grouped_dbias_scaled")
def _(draw: Draw) -> Given:
    sizes, counts = _groups(draw)
    kind, type = draw.type(), draw.type()
    dy, scale = draw.tensor(sum(counts), draw.columns(), type=kind), draw.tensor(sum(counts), type=DType.Float32)
    parts = [(d * s[:, None]) for d, s in zip(f64(dy).split(counts), f64(scale).split(counts), strict=True)]
    value, size = torch.stack([p.sum(0) for p in parts]), torch.stack([p.abs().sum(0) for p in parts])
    return Given({"dy": dy, "sizes": sizes, "bias_scale": scale, "type": type}, [Wanted(value, sum(counts), size, type=type)])


@word("grouped_dscales")
def _(draw: Draw) -> Given:
    sizes, counts = _groups(draw)
    kind, type = draw.type(), draw.type()
    dy = draw.tensor(sum(counts), draw.columns(), type=kind)
    bias = draw.tensor(len(counts), dy.shape[1], type=kind)
    parts = [(d * b) for d, b in zip(f64(dy).split(counts), f64(bias), strict=True)]
    value, size = torch.cat([p.sum(1) for p in parts]), torch.cat([p.abs().sum(1) for p in parts])
    return Given({"dy": dy, "sizes": sizes, "bias": bias, "type": type}, [Wanted(value, dy.shape[1], size, type=type)])


# Between processes, of which there is one.


@word("all_gather")
def _(draw: Draw) -> Given:
    x = draw.tensor(draw.rows(), draw.columns())
    return Given({"x": x, "group": None}, [Wanted(f64(x), exact=True, type=x.type)])


@word("reduce_scatter")
def _(draw: Draw) -> Given:
    return WORDS["all_gather"](draw)


@word("all_reduce")
def _(draw: Draw) -> Given:
    given = WORDS["all_gather"](draw)
    return Given({**given.arguments, "reduction": draw.of("sum", "max", "mean")}, given.wanted)


# Of types, and what holds tensors.


def _gives(value: Any) -> Callable[[Any], None]:
    def check(found: Any) -> None:
        assert found == value, f"{found} instead of {value}"

    return check


WORDS |= {
    "bit_width": lambda draw: Given({"dtype": (d := draw.type())}, _gives(32 if d is DType.Float32 else 16)),
    "dtype_name": lambda draw: Given({"dtype": (d := draw.type())}, _gives(d.name)),
    "element": lambda draw: Given({"type": (t := draw.out())}, _gives(t.dtype if isinstance(t, QuantizedType) else t)),
    "is_fp8": lambda draw: Given({"of": (t := draw.out())}, _gives(t in FP8)),
    "is_quantized_type": lambda draw: Given({"type": (t := draw.out())}, _gives(t in FP8)),
    "is_rescalable": lambda draw: Given({"type": (t := draw.out())}, _gives(t in FP8)),
    "exponent_of": lambda draw: Given({"factor": 2.0 ** (k := draw.of(-3, 0, 7))}, _gives(k)),
    "has_own_blocks": lambda draw: Given({"shape": (draw.rows(), 32), "type": draw.out()}, _gives(False)),
    "over": lambda draw: Given({"type": (t := draw.of(None, *FLOATS)), "group": None}, _gives(t)),
    "share_amax": lambda draw: Given({"type": draw.out(), "group": None}, _gives(None)),
    "rows_together": lambda draw: Given({"types": [draw.out(), draw.out()]}, _gives(1)),
    "nvte_dtype": lambda draw: Given({"dtype": nvte.te_to_torch_dtype(d := draw.type())}, _gives(d)),
    "torch_to_te_dtype": lambda draw: Given({"dtype": nvte.te_to_torch_dtype(d := draw.type())}, _gives(d)),
    "te_to_torch_dtype": lambda draw: Given({"dtype": (d := draw.type())}, _gives({4: torch.float32, 5: torch.float16, 6: torch.bfloat16}[d])),
    "current_pass": lambda draw: Given({}, lambda found: _gives("inference")(found.kind)),
    "pass_": lambda draw: Given({}, _gives("inference")),
    "set_execution_state": lambda draw: Given({"state": None}, _gives(None)),
    "quantizer_for": lambda draw: Given({"type": (t := draw.out())}, lambda found: _gives(t in FP8)(found is not None)),
    "check_sizes": lambda draw: Given({"sizes": (g := _groups(draw))[0], "groups": len(g[1]), "of": "a word"}, _gives(None)),
}


@word("note_amax")
def _(draw: Draw) -> Given:
    state, amax = nvte.Pass("forward"), torch.ones(1)

    def check(found: Any) -> None:
        assert found is None
        nvte.current_pass().amaxes.clear()

    return Given({"slot": f"{len(state.amaxes)}.x", "amax": amax}, check)


@word("running")
def _(draw: Draw) -> Given:
    state = nvte.Pass("backward")

    def check(found: Any) -> None:
        with found as entered:
            assert entered is state and nvte.current_pass() is state
        assert nvte.current_pass() is not state

    return Given({"state": state}, check)


def _some(draw: Draw) -> list[Tensor]:
    return [draw.tensor(draw.rows(), draw.columns()), nvte.cast(draw.tensor(2, 4), FP8[0])]


@word("flatten")
def _(draw: Draw) -> Given:
    tensors = _some(draw)

    def check(found: Any) -> None:
        for was, now in zip(tensors, nvte.unflatten(*found), strict=True):
            assert was.type == now.type and torch.equal(f64(was), f64(now))

    return Given({"tensors": tensors}, check)


@word("unflatten")
def _(draw: Draw) -> Given:
    tensors = _some(draw)
    leaves, spec = nvte.flatten(tensors)
    return Given({"leaves": leaves, "spec": spec}, [Wanted(f64(x), exact=True, type=x.type) for x in tensors])


@word("take_apart")
def _(draw: Draw) -> Given:
    storage = nvte.cast(draw.tensor(2, 4), FP8[0]).data
    return Given({"storage": storage}, lambda found: _gives(True)(found[0][0] is storage._data))


@word("put_together")
def _(draw: Draw) -> Given:
    storage = nvte.cast(draw.tensor(2, 4), FP8[0]).data
    leaves, spec = nvte.take_apart(storage)
    return Given({"leaves": iter(leaves), "spec": spec}, lambda found: _gives(True)(found._data is storage._data))
