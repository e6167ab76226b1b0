"""The table of operations: how to make each, as op and as module, and what it computes, in plain float64 torch.

A record drives the tests of the op, of the module, and (by ``RECORD_OF``) of every registered fusion that the op is part of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusible import ops
from fusible import pytorch as modules
from fusible.nvte import Tensor as NvteTensor
from fusible.nvte import make_nvte_tensor
from fusible.ops import Op
from fusible.pytorch import BaseModule
from fusible.tex.calls.attention import alibi_slopes

Params = Mapping[str, Tensor]
Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Record:
    """``parameters``: shapes by name, ``"in"`` standing for the input's width and ``"out"`` for the output's.

    ``reference(x, parameters, lengths)``: the result for ``x [tokens, in]`` whose sequences have ``lengths``. ``length``: the longest sum in the
    result or a gradient, beside the number of tokens. ``roundings``: how many values of the activations' type the result passes through.
    """

    name: str
    make: Callable[[Mapping[str, NvteTensor], int], Sequence[Op]] = field(repr=False)
    module: Callable[[int, torch.dtype], BaseModule] = field(repr=False)
    reference: Callable[[Tensor, Params, Sequence[int]], Tensor] = field(repr=False)
    width: int = 7
    parameters: Mapping[str, Shape] = field(default_factory=dict)
    length: int = 1
    roundings: int = 1
    sequences: bool = False
    sides: Sequence[str] = ()
    """Side inputs: one value per row. The reference finds them among the parameters."""

    def shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        sizes = {"in": width, "out": OUT}
        return {name: tuple(sizes[n] if isinstance(n, str) else n for n in shape) for name, shape in self.parameters.items()}


OUT = 10
"""The columns that an MMT of the table gives: even, for the gated activations."""

TABLE: dict[str, Record] = {}
RECORD_OF: dict[type[Op], Record] = {}
"""For a single op type, the record that makes it."""


SIDED: dict[str, Record] = {}
"""The ops whose side inputs come from outside of the pipeline: no plan has them alone."""


class Made(BaseModule):
    """A module of ops without parameters."""

    def __init__(self, *made: Op) -> None:
        torch.nn.Module.__init__(self)
        super().__init__(*made)


def enter(record: Record, op: type[Op] | None = None) -> None:
    assert record.name not in TABLE
    TABLE[record.name] = record
    if op is not None:
        RECORD_OF[op] = record


def _plain(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Params, Sequence[int]], Tensor]:
    return lambda x, parameters, lengths: activation(x)


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Params, Sequence[int]], Tensor]:
    def reference(x: Tensor, parameters: Params, lengths: Sequence[int]) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return activation(a) * b

    return reference


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: Tensor) -> Tensor:
    return x.relu().square()


_PLAIN = {"GELU": _gelu, "ErfGELU": F.gelu, "QGELU": _qgelu, "ReLU": torch.relu, "SiLU": F.silu, "SReLU": _srelu}
_GATED = {
    "GLU": torch.sigmoid,
    "GeGLU": _gelu,
    "ErfGeGLU": F.gelu,
    "QGeGLU": _qgelu,
    "ReGLU": torch.relu,
    "SReGLU": _srelu,
    "SwiGLU": F.silu,
}
for _name, _function in _PLAIN.items():
    _op, _module = getattr(ops, _name), getattr(modules, _name)
    enter(Record(_name, lambda p, w, op=_op: [op()], lambda w, d, m=_module: m(), _plain(_function)), _op)
for _name, _function in _GATED.items():
    _op, _module = getattr(ops, _name), getattr(modules, _name)
    enter(Record(_name, lambda p, w, op=_op: [op()], lambda w, d, m=_module: m(), _gated(_function), width=10), _op)


def _situglu(x: Tensor, beta1: float = 4.0, beta2: float = 25.0) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(b / beta2)


def _clamped_swiglu(x: Tensor, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    a = a.clamp(max=limit)
    return a * torch.sigmoid(alpha * a) * (b.clamp(-limit, limit) + glu_linear_offset)


def _swiglu(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return F.silu(a) * b


def _apart(x: Tensor, size: int) -> Tensor:
    """``[a0 b0 a1 b1 ..]`` in blocks of ``size`` columns as ``[a0 a1 .. b0 b1 ..]``."""
    blocks = x.split(size, dim=-1)
    return torch.cat([*blocks[::2], *blocks[1::2]], dim=-1)


def _in_blocks(x: Tensor, parameters: Params, lengths: Sequence[int], *, gate: Callable[..., Tensor], size: int | None, options: Any) -> Tensor:
    return gate(x if size is None else _apart(x, size), **options)


def _scaled(x: Tensor, parameters: Params, lengths: Sequence[int], **how: Any) -> Tensor:
    return _in_blocks(x, parameters, lengths, **how) * parameters["3.scales"][..., None]


_SITU, _CLAMP = {"beta1": 1.5, "beta2": 2.0}, {"limit": 0.75, "alpha": 1.25, "glu_linear_offset": 0.5}
_BLOCK_GATES: tuple[tuple[str, str, Callable[..., Tensor], dict[str, float]], ...] = (
    ("SwiGLU", "ScaledSwiGLU", _swiglu, {}),
    ("SiTUGLU", "ScaledSiTUGLU", _situglu, _SITU),
    ("ClampedSwiGLU", "ScaledClampedQGeGLU", _clamped_swiglu, _CLAMP),
)
for _name, _scaled_name, _function, _options in _BLOCK_GATES:
    for _size, _chosen in ((None, {}), (1, {}), (3, _options)):
        _suffix = f"-blocks of {_size}" if _size else ""
        _make = partial(getattr(ops, _name), glu_interleave_size=_size, **_chosen)
        _how = {"gate": _function, "size": _size, "options": _chosen}
        if _suffix or _name not in TABLE:
            enter(Record(_name + _suffix, lambda p, w, m=_make: [m()], lambda w, d, m=_make: Made(m()), partial(_in_blocks, **_how), width=12))
        _make = partial(getattr(ops, _scaled_name), "3.scales", glu_interleave_size=_size, **_chosen)
        SIDED[_scaled_name + _suffix] = Record(
            _scaled_name + _suffix,
            lambda p, w, m=_make: [m()],
            lambda w, d, m=_make: Made(m()),
            partial(_scaled, **_how),
            width=12,
            length=12,
            sides=("3.scales",),
        )
SIDED["ScaledSReLU"] = Record(
    "ScaledSReLU",
    lambda p, w: [ops.ScaledSReLU("3.scales")],
    lambda w, d: Made(ops.ScaledSReLU("3.scales")),
    partial(_scaled, gate=_srelu, size=None, options={}),
    width=12,
    length=12,
    sides=("3.scales",),
)


def _enter_made(name: str, make: Callable[[], Sequence[Op]], reference: Callable[[Tensor], Tensor], op: type[Op] | None = None, **rest: Any) -> None:
    enter(Record(name, lambda p, w: make(), lambda w, d: Made(*make()), _plain(reference), **rest), op)


_enter_made("ConstantScale", lambda: [ops.ConstantScale(-0.3)], lambda x: -0.3 * x, ops.ConstantScale)
_enter_made("Identity", lambda: [ops.Identity()], lambda x: x, ops.Identity)
_enter_made("Quantize-off", lambda: [ops.Quantize(), ops.Quantize(forward=False, backward=True)], lambda x: x)
_enter_made("Reshape", lambda: [ops.Reshape((-1, 7))], lambda x: x, ops.Reshape)
_enter_made("L2Normalization", lambda: [ops.L2Normalization()], lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), length=7)
_enter_made("L2Normalization-eps", lambda: [ops.L2Normalization(eps=0.5)], lambda x: x / (x.square().sum(-1, keepdim=True) + 0.5).sqrt(), length=7)
_enter_made(
    "extras",
    lambda: [ops.MakeExtra("a"), ops.MakeExtra("1.b"), ops.SiLU(), ops.AddExtra("a"), ops.ConstantScale(2.0), ops.AddExtra("1.b")],
    lambda x: 2 * (F.silu(x) + x) + x,
    roundings=4,
)
for _op in (ops.MakeExtra, ops.AddExtra):
    RECORD_OF[_op] = Record(_op.__name__, lambda p, w, op=_op: [op("2.extra")], lambda w, d: Made(), lambda x, p, lengths: x)


def _norm(x: Tensor, parameters: Params, lengths: Sequence[int], *, eps: float, centre: bool, zero_centered: bool) -> Tensor:
    if centre:
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (parameters["weight"] + float(zero_centered))
    return y + parameters["bias"] if centre else y


for _zero in (False, True):
    _suffix, _options = ("-zero_centered_gamma", {"zero_centered_gamma": True}) if _zero else ("", {})
    enter(
        Record(
            f"LayerNorm{_suffix}",
            lambda p, w, options=_options: [ops.LayerNorm(p["weight"], p["bias"], eps=1e-3, **options)],
            lambda w, d, options=_options: modules.LayerNorm(w, eps=1e-3, param_dtype=d, **options),
            partial(_norm, eps=1e-3, centre=True, zero_centered=_zero),
            parameters={"weight": ("in",), "bias": ("in",)},
            length=7,
        ),
        None if _zero else ops.LayerNorm,
    )
    enter(
        Record(
            f"RMSNorm{_suffix}",
            lambda p, w, options=_options: [ops.RMSNorm(p["weight"], eps=1e-3, **options)],
            lambda w, d, options=_options: modules.RMSNorm(w, eps=1e-3, param_dtype=d, **options),
            partial(_norm, eps=1e-3, centre=False, zero_centered=_zero),
            parameters={"weight": ("in",)},
            length=7,
        ),
        None if _zero else ops.RMSNorm,
    )

enter(
    Record(
        "MMT",
        lambda p, w: [ops.MMT(p["weight"])],
        lambda w, d: modules.Linear(w, OUT, bias=False, param_dtype=d),
        lambda x, p, lengths: x @ p["weight"].T,
        width=11,
        parameters={"weight": ("out", "in")},
        length=11,
    ),
    ops.MMT,
)
for _parallel in (
    ops.ColumnParallelMMT,
    ops.RowParallelMMT,
):  # in a group of one process; what several make of them: test_parallel_linear, test_layouts
    RECORD_OF[_parallel] = replace(RECORD_OF[ops.MMT], name=_parallel.__name__, make=lambda p, w, op=_parallel: [op(p["weight"])])
enter(
    Record(
        "Linear",
        lambda p, w: [ops.MMT(p["weight"]), ops.Add(p["bias"])],
        lambda w, d: modules.Linear(w, OUT, param_dtype=d),
        lambda x, p, lengths: x @ p["weight"].T + p["bias"],
        width=11,
        parameters={"weight": ("out", "in"), "bias": ("out",)},
        length=11,
        roundings=2,
    )
)


class Bias(BaseModule):
    """The module of the op Add, which the package has as a part of Linear only."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        torch.nn.Module.__init__(self)
        self.bias = torch.nn.Parameter(torch.zeros(width, dtype=dtype))
        super().__init__(ops.Add(make_nvte_tensor(self.bias)))


enter(Record("Add", lambda p, w: [ops.Add(p["bias"])], Bias, lambda x, p, lengths: x + p["bias"], parameters={"bias": ("in",)}), ops.Add)
enter(
    Record(
        "Residual",
        lambda p, w: [ops.ResidualBegin(), ops.SiLU(), ops.ResidualEnd()],
        lambda w, d: modules.Residual(modules.SiLU()),
        lambda x, p, lengths: x + F.silu(x),
        roundings=2,
    )
)
RECORD_OF[ops.ResidualBegin] = Record("ResidualBegin", lambda p, w: [ops.ResidualBegin()], Bias, lambda x, p, lengths: x)
RECORD_OF[ops.ResidualEnd] = Record("ResidualEnd", lambda p, w: [ops.ResidualEnd()], Bias, lambda x, p, lengths: x)
enter(Record("Dropout-off", lambda p, w: [ops.Dropout(0.0)], lambda w, d: modules.Dropout(0.0), lambda x, p, lengths: x))
RECORD_OF[ops.Dropout] = Record("Dropout", lambda p, w: [ops.Dropout(0.25)], lambda w, d: modules.Dropout(0.25), lambda x, p, lengths: x)


def _rotated(x: Tensor, base: float) -> Tensor:
    """``x [tokens, heads, d]`` with the halves of a head rotated by ``position * base^(-2 i / d)``."""
    tokens, _, d = x.shape
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _qk_norm(x: Tensor, parameters: Params, lengths: Sequence[int], *, heads: int, groups: int, zero_centered: bool) -> Tensor:
    width = len(parameters["q_weight"])
    q, k, v = x.split([n * width for n in (heads, groups, groups)], dim=-1)
    norm = partial(_norm, lengths=lengths, eps=1e-3, centre=False, zero_centered=zero_centered)
    parts = [norm(part.unflatten(-1, (-1, width)), {"weight": parameters[name]}).flatten(-2) for part, name in ((q, "q_weight"), (k, "k_weight"))]
    return torch.cat([*parts, v], dim=-1)


for _name, _options in (("QKNorm", {"groups": 2}), ("QKNorm-zero_centered_gamma", {"zero_centered_gamma": True})):
    _given = {"eps": 1e-3, **_options}
    _groups = _options.get("groups", 4)
    enter(
        Record(
            _name,
            lambda p, w, given=_given: [ops.QKNorm(p["q_weight"], p["k_weight"], 4, **given)],
            lambda w, d, given=_given: modules.QKNorm(4, 3, param_dtype=d, **given),
            partial(_qk_norm, heads=4, groups=_groups, zero_centered="zero_centered_gamma" in _options),
            width=(4 + 2 * _groups) * 3,
            parameters={"q_weight": (3,), "k_weight": (3,)},
            length=12,
        ),
        ops.QKNorm if _name == "QKNorm" else None,
    )


def _attention(
    x: Tensor,
    parameters: Params,
    lengths: Sequence[int],
    *,
    heads: int,
    groups: int,
    head_width: int,
    causal: bool,
    rope_base: float | None,
    window_size: tuple[int, int],
    soft_cap: float | None = None,
    alibi: Sequence[float] | bool = False,
) -> Tensor:
    results = [x[:0, : heads * head_width]]
    for part in x.split(list(lengths)):
        tokens = len(part)
        q, k, v = part.split([n * head_width for n in (heads, groups, groups)], dim=-1)
        q, k, v = q.view(tokens, heads, head_width), k.view(tokens, groups, head_width), v.view(tokens, groups, head_width)
        if rope_base is not None:
            q, k = _rotated(q, rope_base), _rotated(k, rope_base)
        k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * head_width**-0.5
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if alibi is not False:
            slopes = alibi_slopes(heads) if alibi is True else alibi
            scores = scores - torch.tensor(slopes, dtype=x.dtype)[:, None, None] * distance.abs()
        if causal:
            scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)
        left, right = (edge if edge >= 0 else tokens for edge in window_size)
        scores = scores.masked_fill((distance > left) | (-distance > right), -torch.inf)
        results.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(tokens, heads * head_width))
    return torch.cat(results)


def _enter_attention(
    name: str,
    heads: int,
    groups: int,
    head_width: int,
    causal: bool,
    rope_base: float | None,
    roundings: int,
    window_size: tuple[int, int] = (-1, -1),
    **scores: Any,
) -> None:
    options: dict[str, Any] = {"groups": groups, "causal": causal, "rope_base": rope_base, "window_size": window_size, **scores}
    enter(
        Record(
            name,
            lambda p, w: [ops.DotProductAttention(heads, head_width, **options)],
            lambda w, d: modules.DotProductAttention(heads, head_width, **options),
            partial(_attention, heads=heads, head_width=head_width, **options),
            width=(heads + 2 * groups) * head_width,
            length=16,
            roundings=roundings,
            sequences=True,
        ),
        ops.DotProductAttention if name == "attention" else None,
    )


def _latent(
    x: Tensor,
    parameters: Params,
    lengths: Sequence[int],
    *,
    heads: int,
    key_width: int,
    rope_width: int,
    value_width: int | None = None,
    groups: int | None = None,
    causal: bool = True,
    rope_base: float = 10000.0,
    rope_factors: Sequence[float] | None = None,
    rope_interleaved: bool = False,
    rope_scale: float = 1.0,
) -> Tensor:
    groups = heads if groups is None else groups
    own, results = key_width if value_width is None else value_width, [x[:0, :1].expand(-1, heads * (value_width or key_width))]
    factors = torch.tensor(rope_factors or [1.0] * (rope_width // 2), dtype=x.dtype)

    def rotated(z: Tensor) -> Tensor:
        turns = rope_base ** (-torch.arange(0, rope_width, 2, dtype=x.dtype) / rope_width) * factors
        angles = (torch.arange(len(z), dtype=x.dtype)[:, None] * turns)[:, None]
        a, b = (z[..., 0::2], z[..., 1::2]) if rope_interleaved else z.chunk(2, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1) * rope_scale

    for part in x.split(list(lengths)):
        q, of_all, kv = part.split([heads * (key_width + rope_width), rope_width, groups * (key_width + (value_width or 0))], dim=-1)
        q, kv = q.unflatten(1, (heads, -1)), kv.unflatten(1, (groups, -1))
        plain, v = (kv, kv) if value_width is None else kv.split([key_width, own], dim=-1)
        k = torch.cat([plain, rotated(of_all[:, None]).expand(-1, groups, -1)], dim=-1)
        q = torch.cat([q[..., :key_width], rotated(q[..., key_width:])], dim=-1)
        k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * (key_width + rope_width) ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones(len(part), len(part), dtype=torch.bool).triu(1), -torch.inf)
        results.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1))
    return torch.cat(results)


def _enter_latent(name: str, roundings: int, heads: int, key_width: int, rope_width: int, **options: Any) -> None:
    groups, own = options.get("groups") or heads, options.get("value_width") or 0
    enter(
        Record(
            name,
            lambda p, w: [ops.LatentAttention(heads, key_width, rope_width, **options)],
            lambda w, d: modules.LatentAttention(heads, key_width, rope_width, **options),
            partial(_latent, heads=heads, key_width=key_width, rope_width=rope_width, **options),
            width=heads * (key_width + rope_width) + rope_width + groups * (key_width + own),
            length=16,
            roundings=roundings,
            sequences=True,
        ),
        ops.LatentAttention if name == "latent" else None,
    )


_enter_latent("latent", 3, 3, 4, 2, value_width=5)
_enter_latent("latent-pairs", 3, 4, 3, 4, value_width=2, groups=2, rope_interleaved=True, rope_factors=(1.0, 0.25), rope_base=100.0)
_enter_latent("latent-in_keys", 4, 4, 6, 2, groups=1, rope_interleaved=True)
_enter_latent("latent-in_keys_all", 4, 2, 4, 4, groups=2, causal=False)
_enter_latent("latent-scaled", 4, 2, 4, 4, value_width=4, rope_scale=1.25)
_enter_attention("attention", 3, 3, 4, True, None, 2)
_enter_attention("attention-all", 2, 2, 5, False, None, 2)
_enter_attention("attention-grouped", 4, 2, 3, True, None, 2)
_enter_attention("attention-one_group", 3, 1, 4, False, None, 2)
_enter_attention("attention-rope", 4, 2, 6, True, 10000.0, 3)
_enter_attention("attention-window", 4, 2, 4, True, None, 2, (2, 0))
_enter_attention("attention-window-both_ways", 2, 1, 4, False, None, 2, (1, 3))
_enter_attention("attention-cap", 4, 2, 4, True, None, 2, soft_cap=0.5)
# Slopes draw probabilities towards 1, of which dp - rowsum(dO O) is a difference of two that both carry O's rounding.
_enter_attention("attention-alibi", 4, 2, 4, True, None, 3, alibi=True)
_enter_attention("attention-cap_and_slopes", 2, 1, 4, False, 100.0, 3, soft_cap=1.5, alibi=(0.25, 0.75))
