"""Right calls of every module and operation (``module_draws``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import module_formulas as formulas
import torch
from module_draws import DRAWS, Draw, Right, draws
from rounding_noise import Noise
from torch import Tensor, nn

import fusible
from fusible.pytorch import ops

__all__ = ["DRAWS", "norm_formula", "rowwise"]

Values = dict[str, Tensor]
LIMIT = 0.7003
"""Where values are clamped: none of those drawn lies there."""


# Of one input, row by row.


def rowwise(draw: Draw, module: nn.Module, width: int, f: Callable[[Noise, Tensor, Values], Tensor], **more: Any) -> Right:
    modules = isinstance(module, fusible.pytorch.BaseModule) and not isinstance(module, (ops.FusibleOperation, ops.Sequential))
    leading = draw.leading(ranks=(1, 2)) if modules else draw.leading()
    formula = lambda n, inputs, parameters: n.stored(f(n, inputs["x"], parameters))  # noqa: E731
    return Right(module, lambda: {"x": draw.values(*leading, width)}, formula, _lengths(draw, leading) if modules else {}, **more)


def _lengths(draw: Draw, leading: tuple[int, ...]) -> dict[str, Any]:
    """``seq_lens`` for tokens that may have some."""
    if len(leading) != 1 or draw.of(True, False):
        return {}
    cut = draw.random.randint(0, leading[0])
    return {"seq_lens": torch.tensor([cut, 0, leading[0] - cut], dtype=torch.int32)}


@draws("modules", *formulas.PLAIN)
def _(name: str, draw: Draw) -> Right:
    return rowwise(draw, getattr(fusible, name)(), draw.width(), lambda n, x, _: n.terms(formulas.PLAIN[name](n, n.terms(x))))


@draws("operations", *formulas.PLAIN)
def _(name: str, draw: Draw) -> Right:
    return rowwise(draw, getattr(ops, name)(), draw.width(), lambda n, x, _: n.terms(formulas.PLAIN[name](n, n.terms(x))))


@draws("modules", *formulas.GATES)
def _(name: str, draw: Draw) -> Right:
    return rowwise(draw, getattr(fusible, name)(), 2 * draw.width(), lambda n, x, _: formulas.gated(n, x, formulas.GATES[name]))


@draws("operations", *(name.replace("GeGLU", "GEGLU") for name in formulas.GATES if name != "SwiGLU"))
def _(name: str, draw: Draw) -> Right:
    gate = formulas.GATES[name.replace("GEGLU", "GeGLU")]
    return rowwise(draw, getattr(ops, name)(), 2 * draw.width(), lambda n, x, _: formulas.gated(n, x, gate))


def _blocks(draw: Draw, width: int) -> int | None:
    """A size of blocks in which two halves of ``width`` columns may alternate."""
    return draw.of(None, *(size for size in (1, 2, 3, 8, 32) if width % size == 0))


@draws("operations", "SwiGLU", "SiTUGLU", "ClampedSwiGLU", "ScaledSwiGLU", "ScaledSiTUGLU", "ScaledClampedQGeGLU")
def _(name: str, draw: Draw) -> Right:
    width = draw.width()
    size, options = _blocks(draw, width), {}
    if "SiTU" in name and draw.of(True, False):
        options = {"beta1": draw.of(1.0, 4.0), "beta2": draw.of(2.0, 25.0)}
    elif "Clamped" in name and draw.of(True, False):
        options = {"limit": LIMIT, "alpha": draw.of(1.0, 1.702), "glu_linear_offset": draw.of(0.0, 0.5)}
    betas = (options.get("beta1", 4.0), options.get("beta2", 25.0))
    clamp = (options.get("limit", 7.0), options.get("alpha", 1.702), options.get("glu_linear_offset", 1.0))

    def formula(n: Noise, x: Tensor) -> Tensor:
        if "SiTU" in name:
            return formulas.situ(n, x, size, *betas)
        return formulas.clamped(n, x, size, *clamp) if "Clamped" in name else formulas.gated(n, x, formulas.GATES["SwiGLU"], size)

    module = getattr(ops, name)(glu_interleave_size=size, **options)
    return _scaled(draw, module, 2 * width, formula) if "Scaled" in name else rowwise(draw, module, 2 * width, lambda n, x, _: formula(n, x))


def _scaled(draw: Draw, module: nn.Module, width: int, f: Callable[[Noise, Tensor], Tensor]) -> Right:
    leading, kind = draw.leading(), draw.of(draw.dtype, torch.float32)
    formula = lambda n, inputs, _: n.stored(formulas.scaled(n, f(n, inputs["x"]), inputs["scales"]))  # noqa: E731
    return Right(module, lambda: {"x": draw.values(*leading, width), "scales": draw.values(*leading, dtype=kind)}, formula)


@draws("operations", "ScaledSReLU")
def _(draw: Draw) -> Right:
    return _scaled(draw, ops.ScaledSReLU(), draw.width(), lambda n, x: n.terms(formulas.PLAIN["SReLU"](n, n.terms(x))))


@draws("operations", "ScaledTanhSReLU")
def _(draw: Draw) -> Right:
    s = draw.of(0.5, 2.0, 10.0)
    return _scaled(draw, ops.ScaledTanhSReLU(tanh_clamp_scale=s), draw.width(), lambda n, x: formulas.tanh_srelu(n, x, s))


# Norms.


@draws("modules", "LayerNorm", "RMSNorm")
def _(name: str, draw: Draw) -> Right:
    width, zero, eps = draw.width(), draw.of(True, False), draw.of(1e-5, 1e-2)
    module = getattr(fusible, name)(width, eps, zero, draw.param_dtype)
    return rowwise(draw, draw.filled(module), width, norm_formula(name, eps, zero))


def norm_formula(name: str, eps: float, zero: bool) -> Callable[[Noise, Tensor, Values], Tensor]:
    if name == "LayerNorm":
        return lambda n, x, p: formulas.layernorm(n, x, p["weight"], p["bias"], eps, zero)
    return lambda n, x, p: formulas.rmsnorm(n, x, p["weight"], eps, zero)


@draws("operations", "LayerNorm", "RMSNorm")
def _(name: str, draw: Draw) -> Right:
    width, zero, eps = draw.width(), draw.of(True, False), draw.of(1e-5, 1e-2)
    shape = (draw.of(1, 2, 3), width) if draw.of(True, False, False) else (width,)
    module = draw.filled(getattr(ops, name)(shape, eps=eps, zero_centered_gamma=zero, dtype=draw.param_dtype))
    leading, f = draw.leading(), norm_formula(name, eps, zero)
    return Right(module, lambda: {"x": draw.values(*leading, *shape)}, lambda n, inputs, p: n.stored(f(n, inputs["x"], p)))


@draws("operations", "L2Normalization")
def _(draw: Draw) -> Right:
    eps = draw.of(1e-6, 1e-2)
    return rowwise(draw, ops.L2Normalization(eps=eps), draw.width(), lambda n, x, _: formulas.l2norm(n, x, eps))


# Products.


def _bias(p: Values) -> Tensor | None:
    return next((value for name, value in p.items() if name.endswith("bias")), None)


def _weight(p: Values) -> Tensor:
    return next(value for name, value in p.items() if name.endswith("weight"))


def _linear(n: Noise, x: Tensor, p: Values) -> Tensor:
    return formulas.linear(n, x, _weight(p), _bias(p))


@draws("modules", "Linear")
def _(draw: Draw) -> Right:
    into, out = draw.width(), draw.width()
    module = fusible.Linear(into, out, draw.of(True, False), draw.param_dtype, accumulate_into_main_grad=draw.of(True, False, False))
    return rowwise(draw, draw.filled(module), into, _linear)


@draws("operations", "Linear", "BasicLinear")
def _(name: str, draw: Draw) -> Right:
    into, out = draw.width(), draw.width()
    options = {"bias": draw.of(True, False)} if name == "Linear" else {}
    module = getattr(ops, name)(into, out, dtype=draw.param_dtype, accumulate_into_main_grad=draw.of(True, False, False), **options)
    return rowwise(draw, draw.filled(module), into, _linear)


@draws("operations", "Bias")
def _(draw: Draw) -> Right:
    width = draw.width()
    return rowwise(draw, draw.filled(ops.Bias(width, dtype=draw.param_dtype)), width, lambda n, x, p: formulas.shifted(n, x, p["bias"]))


@draws("operations", "GroupedLinear")
def _(draw: Draw) -> Right:
    groups, into, out, bias = draw.of(1, 2, 3), draw.width(), draw.width(), draw.of(True, False)
    scale_bias, single, single_bias = draw.of(True, False), draw.of(True, False), draw.of(True, False)
    module = ops.GroupedLinear(
        groups, into, out, bias=bias, dtype=draw.dtype if draw.recipe is not None else draw.param_dtype, scale_bias=scale_bias,
        single_grouped_weight=single, single_grouped_bias=single_bias,
    )  # fmt: skip
    leading = draw.leading(ranks=(1, 1, 2))
    rows, kind = torch.Size(leading).numel(), draw.of(torch.int32, torch.int64)
    cuts = sorted(draw.random.randint(0, rows) for _ in range(groups))
    if draw.recipe is not None:
        cuts = [cut // 32 * 32 for cut in cuts]
    sizes = [cut - before for cut, before in zip(cuts, [0, *cuts[:-1]], strict=True)]

    def inputs() -> Values:
        extra = {"scales": draw.values(rows)} if bias and scale_bias else {}
        return {"x": draw.values(*leading, into), "split_sizes": torch.tensor(sizes, dtype=kind), **extra}

    def formula(n: Noise, inputs: Values, p: Values) -> Tensor:
        def parts(name: str) -> list[Tensor]:
            return [*p[name]] if name in p else [p[f"{name}{i}"] for i in range(groups) if f"{name}{i}" in p]

        return n.stored(formulas.grouped(n, inputs["x"], parts("weight"), parts("bias"), sizes, inputs.get("scales")))

    return Right(draw.filled(module), inputs, formula, constants=frozenset({"split_sizes"}))


@draws("modules", "MixtureOfExperts")
def _(draw: Draw) -> Right:
    """Every token goes to all experts: of near logits the choice would be another in float64."""
    count, into, inner, activation = draw.of(1, 2, 3), draw.width(), draw.width(), draw.of("gelu", "swiglu")
    sigmoid = count > 1 and draw.of(True, False)
    router: dict[str, Any] = {"score_function": "sigmoid", "expert_bias": draw.of(True, False)} if sigmoid else {}
    module = fusible.MixtureOfExperts(into, inner, count, count, activation=activation, param_dtype=draw.param_dtype, **router)
    return rowwise(draw, draw.filled(module), into, lambda n, x, p: formulas.mixture(n, x, *p.values(), activation, sigmoid))


# Attention.


def _attention(
    draw: Draw, module: nn.Module, heads: int, groups: int, width: int, causal: bool, rope: formulas.Rope | None, scale: float, *scores: Any
) -> Right:
    columns = (heads + 2 * groups) * width
    leading = draw.leading(ranks=(1, 2))
    given = _lengths(draw, leading)
    tokens = torch.Size(leading).numel()
    lengths = given["seq_lens"].tolist() if given else [leading[-1]] * (tokens // leading[-1]) if tokens else []

    def formula(n: Noise, inputs: Values, _: Values) -> Tensor:
        x = inputs["x"].reshape(-1, columns)
        y = formulas.attention(n, x, lengths, heads, groups, width, causal, rope, scale, *scores) if tokens else x[:, : heads * width]
        return y.reshape(*leading, heads * width)

    return Right(module, lambda: {"x": draw.values(*leading, columns)}, formula, given)


def _head_width(draw: Draw) -> int:
    return draw.of(16, 32) if draw.recipe is not None else draw.of(2, 4, 8, 16)


def _rope(draw: Draw, width: int) -> tuple[formulas.Rope | None, dict[str, Any]]:
    """How heads are rotated, and the options of a module that say so."""
    base, rotated, scaled = draw.of(None, 10000.0, 100.0), draw.of(None, None, 2), draw.of(True, False)
    if base is None:
        return None, {"rope_base": None}
    pairs = (rotated or width) // 2
    factors = tuple(1 / (i + 1) for i in range(pairs)) if scaled else ()
    return formulas.Rope(base, 2 * pairs, factors or (1.0,) * pairs), {"rope_base": base, "rope_width": rotated, "rope_factors": factors}


@draws("modules", "DotProductAttention")
def _(draw: Draw) -> Right:
    groups, width, causal = draw.of(1, 2), _head_width(draw), draw.of(True, False)
    rope, rotary = _rope(draw, width)
    heads, scale = groups * draw.of(1, 2), draw.of(None, 0.3)
    cap, slopes = draw.of(None, None, 2.0), draw.of(None, None, [0.5 / (i + 1) for i in range(heads)])
    options = {"groups": groups, "causal": causal, **rotary, "scale": scale, "soft_cap": cap, "alibi": slopes or False}
    module = fusible.DotProductAttention(heads, width, **options)
    return _attention(draw, module, heads, groups, width, causal, rope, width**-0.5 if scale is None else scale, cap, slopes)


@draws("modules", "LatentAttention")
def _(draw: Draw) -> Right:
    groups, causal, pairs, scale = draw.of(1, 2), draw.of(True, False), draw.of(True, False), draw.of(None, 0.3)
    heads, key, turned = groups * draw.of(1, 2), _head_width(draw), draw.of(16) if draw.recipe is not None else draw.of(2, 4)
    value, base, scaled = draw.of(None, _head_width(draw)), draw.of(10000.0, 100.0), draw.of(True, False)
    factors = tuple(1 / (i + 1) for i in range(turned // 2)) if scaled else ()
    options = {"groups": groups, "value_width": value, "causal": causal, "scale": scale}
    module = fusible.LatentAttention(heads, key, turned, rope_base=base, rope_factors=factors, rope_interleaved=pairs, **options)
    columns, leading = heads * (key + turned) + turned + groups * (key + (value or 0)), draw.leading(ranks=(1, 2))
    given, tokens = _lengths(draw, leading), torch.Size(leading).numel()
    lengths = given["seq_lens"].tolist() if given else [leading[-1]] * (tokens // leading[-1]) if tokens else []
    rope = formulas.Rope(base, turned, factors or (1.0,) * (turned // 2))

    def formula(n: Noise, inputs: Values, _: Values) -> Tensor:
        x, width = inputs["x"].reshape(-1, columns), (key + turned) ** -0.5 if scale is None else scale
        if not tokens:
            return x[:, : heads * (value or key)].reshape(*leading, heads * (value or key))
        y = formulas.latent_attention(n, x, lengths, heads, groups, (key, turned, value), causal, rope, pairs, width)
        return y.reshape(*leading, y.shape[1])

    return Right(module, lambda: {"x": draw.values(*leading, columns)}, formula, given)


@draws("modules", "CrossAttention")
def _(draw: Draw) -> Right:
    groups, width, batch, tokens, keys = draw.of(1, 2), _head_width(draw), draw.of(1, 2, 3), draw.of(1, 3, 5), draw.of(1, 4, 7)
    heads, cap = groups * draw.of(1, 2), draw.of(None, 2.0)
    module = ops.Sequential(fusible.CrossAttention(heads, width, groups=groups, soft_cap=cap))

    def inputs() -> Values:
        return {"x": draw.values(batch, tokens, heads * width), "kv": draw.values(batch, keys, 2 * groups * width)}

    def formula(n: Noise, given: Values, _: Values) -> Tensor:
        return formulas.cross_attention(n, given["x"], given["kv"], heads, groups, width, width**-0.5, cap)

    return Right(module, inputs, formula)


@draws("modules", "QKNorm")
def _(draw: Draw) -> Right:
    groups, width, zero, eps = draw.of(1, 2), _head_width(draw), draw.of(True, False), draw.of(1e-6, 1e-2)
    heads = groups * draw.of(1, 2)
    module = fusible.QKNorm(heads, width, groups=groups, eps=eps, zero_centered_gamma=zero, param_dtype=draw.param_dtype)

    def formula(n: Noise, x: Tensor, p: Values) -> Tensor:
        q, k, v = x.split([count * width for count in (heads, groups, groups)], dim=-1)
        parts = ((q, "q_weight"), (k, "k_weight"))
        normal = [formulas.rmsnorm(n, part.unflatten(-1, (-1, width)), p[name], eps, zero).flatten(-2) for part, name in parts]
        return torch.cat([*normal, n.terms(v)], dim=-1)

    return rowwise(draw, draw.filled(module), (heads + 2 * groups) * width, formula)


@draws("modules", "MultiHeadedSelfAttention", "GroupedQuerySelfAttention", "MultiQuerySelfAttention")
def _(name: str, draw: Draw) -> Right:
    width, causal, heads = _head_width(draw), draw.of(True, False), draw.of(1, 2, 4)
    rope, rotary = _rope(draw, width)
    shared = draw.of(*(n for n in (1, 2, 4) if heads % n == 0))
    groups = {"MultiHeaded": heads, "GroupedQuery": shared, "MultiQuery": 1}[name.removesuffix("SelfAttention")]
    given = (groups,) if name.startswith("Grouped") else ()
    module = getattr(fusible, name)(heads * width, heads, *given, causal=causal, **rotary)
    return _attention(draw, module, heads, groups, width, causal, rope, width**-0.5)


# What moves values.


def _dropout(draw: Draw, module: nn.Module, p: float) -> Right:
    module.train(draw.of(True, True, False))
    right = rowwise(draw, module, draw.width(), lambda n, x, _: x)

    def formula(n: Noise, inputs: Values, _: Values) -> Tensor:
        x = inputs["x"]
        if not module.training:
            return x
        keep = ((right.seen[0] != 0) | (x == 0)).double()
        count = (x != 0).sum().item()
        kept = (keep * (x != 0)).sum().item()
        assert abs(kept - (1 - p) * count) <= 6 * (p * (1 - p) * count) ** 0.5 + 1e-9, f"{kept} of {count} are kept"
        return n.stored(n.terms(x * keep / (1 - p)))

    right.formula = formula
    return right


@draws("modules", "Dropout")
def _(draw: Draw) -> Right:
    p = draw.of(0.0, 0.1, 0.5, 0.9)
    return _dropout(draw, fusible.Dropout(p), p)


@draws("operations", "Dropout")
def _(draw: Draw) -> Right:
    p = draw.of(0.0, 0.1, 0.5, 0.9)
    return _dropout(draw, ops.Dropout(p), p)


@draws("operations", "Identity", "AllGather", "AllReduce", "ReduceScatter")
def _(name: str, draw: Draw) -> Right:
    """Of one process."""
    right = rowwise(draw, getattr(ops, name)(), draw.width(), lambda n, x, _: x)
    if name != "Identity":
        leading = draw.leading(ranks=(1, 2))
        width = draw.width()
        right.inputs = lambda: {"x": draw.values(*leading, width)}
    return right


@draws("operations", "ConstantScale")
def _(draw: Draw) -> Right:
    scale = draw.of(-0.3, 0.0, 2.0)
    return rowwise(draw, ops.ConstantScale(scale), draw.width(), lambda n, x, _: n.terms(scale * x))


@draws("operations", "Reshape")
def _(draw: Draw) -> Right:
    shape = draw.of((2, 3, 4), (6, 4), (1, 24), (0, 4), (4, 0, 2))
    wanted = draw.of(*(w for w in ((24,), (-1,), (4, -1), (2, 2, -1, 2), (8, 3)) if torch.Size(shape).numel() or w == (-1,)))
    formula = lambda n, inputs, _: n.stored(inputs["x"].reshape(wanted))  # noqa: E731
    return Right(ops.Reshape(wanted), lambda: {"x": draw.values(*shape)}, formula)


@draws("operations", "Quantize")
def _(draw: Draw) -> Right:
    forward, backward = draw.of(True, False), draw.of(True, False)

    def quantized(n: Noise, x: Tensor, _: Values) -> Tensor:
        there = lambda v: n.operand(v.reshape(-1, v.shape[-1]), "input").reshape(v.shape) if forward and n.recipe else v * 1  # noqa: E731
        back = lambda v: n.operand(v.reshape(-1, v.shape[-1]), "grad_output").reshape(v.shape) if backward and n.recipe else v  # noqa: E731
        return n.passed(x, there, back)

    return rowwise(draw, ops.Quantize(forward, backward), draw.width(), quantized)


@draws("operations", "AddExtraInput")
def _(draw: Draw) -> Right:
    leading, width, kind = draw.leading(), draw.width(), draw.of(draw.dtype, torch.float32)
    module = ops.AddExtraInput(in_place=draw.of(True, False))
    formula = lambda n, inputs, _: n.stored(n.terms(inputs["x"]) + n.stored(inputs["extra"]))  # noqa: E731
    return Right(module, lambda: {"x": draw.values(*leading, width), "extra": draw.values(*leading, width, dtype=kind)}, formula)


@draws("operations", "MakeExtraOutput")
def _(draw: Draw) -> Right:
    leading, width = draw.leading(), draw.width()
    module = ops.MakeExtraOutput(in_place=draw.of(True, False))
    formula = lambda n, inputs, _: (n.stored(inputs["x"] * 1), n.stored(inputs["x"] * 1))  # noqa: E731
    return Right(module, lambda: {"x": draw.values(*leading, width)}, formula)
