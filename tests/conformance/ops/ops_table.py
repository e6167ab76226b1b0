"""The table of operations: how to make each, as op and as module, and what it computes, in plain float64 torch.

A record drives the tests of the op, of the module, and (by ``RECORD_OF``) of every registered fusion that the op is part of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fusible import ops
from fusible import pytorch as modules
from fusible.nvte import Tensor as NvteTensor
from fusible.nvte import make_nvte_tensor
from fusible.ops import Op
from fusible.pytorch import BaseModule

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

    def shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        sizes = {"in": width, "out": OUT}
        return {name: tuple(sizes[n] if isinstance(n, str) else n for n in shape) for name, shape in self.parameters.items()}


OUT = 10
"""The columns that an MMT of the table gives: even, for the gated activations."""

TABLE: dict[str, Record] = {}
RECORD_OF: dict[type[Op], Record] = {}
"""For a single op type, the record that makes it."""


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


_PLAIN = {"GELU": _gelu, "QGELU": _qgelu, "ReLU": torch.relu, "SiLU": F.silu, "SReLU": _srelu}
_GATED = {"GLU": torch.sigmoid, "GeGLU": _gelu, "QGeGLU": _qgelu, "ReGLU": torch.relu, "SReGLU": _srelu, "SwiGLU": F.silu}
for _name, _function in _PLAIN.items():
    _op, _module = getattr(ops, _name), getattr(modules, _name)
    enter(Record(_name, lambda p, w, op=_op: [op()], lambda w, d, m=_module: m(), _plain(_function)), _op)
for _name, _function in _GATED.items():
    _op, _module = getattr(ops, _name), getattr(modules, _name)
    enter(Record(_name, lambda p, w, op=_op: [op()], lambda w, d, m=_module: m(), _gated(_function), width=10), _op)


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


def _attention(
    x: Tensor, parameters: Params, lengths: Sequence[int], *, heads: int, groups: int, head_width: int, causal: bool, rope_base: float | None
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
        if causal:
            scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)
        results.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(tokens, heads * head_width))
    return torch.cat(results)


def _enter_attention(name: str, heads: int, groups: int, head_width: int, causal: bool, rope_base: float | None, roundings: int) -> None:
    options = {"groups": groups, "causal": causal, "rope_base": rope_base}
    enter(
        Record(
            name,
            lambda p, w: [ops.DotProductAttention(heads, head_width, **options)],
            lambda w, d: modules.DotProductAttention(heads, head_width, **options),
            partial(_attention, heads=heads, groups=groups, head_width=head_width, causal=causal, rope_base=rope_base),
            width=(heads + 2 * groups) * head_width,
            length=16,
            roundings=roundings,
            sequences=True,
        ),
        ops.DotProductAttention if name == "attention" else None,
    )


_enter_attention("attention", 3, 3, 4, True, None, 2)
_enter_attention("attention-all", 2, 2, 5, False, None, 2)
_enter_attention("attention-grouped", 4, 2, 3, True, None, 2)
_enter_attention("attention-one_group", 3, 1, 4, False, None, 2)
_enter_attention("attention-rope", 4, 2, 6, True, 10000.0, 3)
