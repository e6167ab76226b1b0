"""Right calls of modules and operations, from which bad calls are made: of every class that the rooms name in ``__all__``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import fusible
from fusible import pytorch, quantized
from fusible.pytorch import ops

__all__ = ["MODULES", "OPERATIONS", "RECIPES", "Subject", "classes_of"]

ROWS, WIDTH = 32, 32
"""A block of MXFP8, which has to be whole."""


@dataclass(frozen=True)
class Subject:
    """``make()`` gives a module, ``arguments()`` a right call of it: positional arguments by the names that ``forward`` has for them, or, of extra
    inputs, that its documentation has."""

    name: str
    make: Callable[[], nn.Module]
    arguments: Callable[[], dict[str, Any]]
    keywords: frozenset[str] = field(default=frozenset())

    def call(self, module: nn.Module, arguments: dict[str, Any]) -> Any:
        by_place = [value for name, value in arguments.items() if name not in self.keywords]
        return module(*by_place, **{name: arguments[name] for name in self.keywords if name in arguments})


def tokens(rows: int = ROWS, columns: int = WIDTH, dtype: torch.dtype = torch.float32, grad: bool = True) -> torch.Tensor:
    made = torch.linspace(-1, 1, rows * columns).reshape(rows, columns).to(dtype)
    return made.requires_grad_(grad)


def _lengths(*lengths: int) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32)


def _module(cls: type[nn.Module], *args: Any, columns: int = WIDTH, **options: Any) -> Subject:
    def arguments() -> dict[str, Any]:
        return {"x": tokens(columns=columns), "seq_lens": _lengths(10, 22)}

    return Subject(cls.__name__, lambda: cls(*args, **options), arguments)


def _cached(cls: type[nn.Module], *args: Any, columns: int, **options: Any) -> Subject:
    def arguments() -> dict[str, Any]:
        cache = fusible.KVCache(2, 32, dtype=torch.float32)
        return {"x": tokens(columns=columns, grad=False), "seq_lens": _lengths(10, 22), "cache": cache}

    return Subject(cls.__name__, lambda: cls(*args, **options), arguments)


def _batch(cls: type[nn.Module], *args: Any, columns: int = WIDTH, **options: Any) -> Subject:
    def arguments() -> dict[str, Any]:
        return {"x": tokens(columns=columns).detach().reshape(2, 16, columns).requires_grad_(), "seq_lens": None}

    return Subject(cls.__name__, lambda: cls(*args, **options), arguments)


def _queries_and_keys() -> dict[str, Any]:
    return {"x": tokens().detach().reshape(2, 16, WIDTH).requires_grad_(), "kv": tokens(columns=2 * WIDTH).detach().reshape(2, 16, 2 * WIDTH)}


def _block() -> list[nn.Module]:
    return [
        fusible.LayerNorm(WIDTH),
        fusible.Residual(fusible.Linear(WIDTH, 3 * WIDTH), fusible.MultiHeadedSelfAttention(WIDTH, 2), fusible.Linear(WIDTH, WIDTH)),
        fusible.Linear(WIDTH, WIDTH),
        fusible.GELU(),
    ]


GATED = ("GLU", "GeGLU", "ErfGeGLU", "QGeGLU", "ReGLU", "SReGLU", "SwiGLU")
PLAIN = ("GELU", "ErfGELU", "QGELU", "ReLU", "SReLU", "SiLU")

MODULES: list[Subject] = [
    _module(fusible.Linear, WIDTH, WIDTH),
    _batch(fusible.Linear, WIDTH, 2 * WIDTH),
    *(_module(getattr(fusible, name)) for name in (*GATED, *PLAIN)),
    _module(fusible.LayerNorm, WIDTH),
    _module(fusible.RMSNorm, WIDTH),
    _module(fusible.QKNorm, 2, 16, columns=3 * WIDTH),
    _module(fusible.Dropout, 0.5),
    _module(fusible.MixtureOfExperts, WIDTH, WIDTH, 4, 2),
    _module(fusible.DotProductAttention, 2, 16, columns=3 * WIDTH),
    _batch(fusible.DotProductAttention, 2, 16, columns=3 * WIDTH, rope_base=10000.0),
    _cached(fusible.DotProductAttention, 2, 16, columns=3 * WIDTH),
    _module(fusible.LatentAttention, 2, 16, 4, columns=2 * 20 + 4 + 2 * 16),
    _cached(fusible.LatentAttention, 2, 16, 4, columns=2 * 20 + 4 + 16 + 8, groups=1, value_width=8),
    Subject("CrossAttention", lambda: ops.Sequential(fusible.CrossAttention(2, 16)), _queries_and_keys),
    _module(fusible.MultiHeadedSelfAttention, WIDTH, 2, columns=3 * WIDTH),
    _module(fusible.GroupedQuerySelfAttention, WIDTH, 4, 2, columns=2 * WIDTH),
    _module(fusible.MultiQuerySelfAttention, WIDTH, 2, columns=2 * WIDTH),
    Subject("Sequential", lambda: fusible.Sequential(*_block()), lambda: {"x": tokens(), "seq_lens": _lengths(10, 22)}),
    Subject("Sequential", lambda: fusible.Sequential(fusible.Linear(WIDTH, WIDTH), nn.Identity(), fusible.GELU()), lambda: {"x": tokens()}),
    Subject("Residual", lambda: fusible.Residual(fusible.Linear(WIDTH, WIDTH)), lambda: {"x": tokens(), "seq_lens": _lengths(10, 22)}),
]


def _operation(cls: type[nn.Module], *args: Any, columns: int = WIDTH, extra: Callable[[], dict[str, Any]] = dict, **options: Any) -> Subject:
    return Subject(cls.__name__, lambda: cls(*args, **options), lambda: {"input": tokens(columns=columns), **extra()})


def _scales() -> dict[str, Any]:
    return {"scales": torch.linspace(0.1, 1, ROWS).requires_grad_()}


def _sizes() -> dict[str, Any]:
    return {"split_sizes": _lengths(10, 22)}


OPERATIONS: list[Subject] = [
    *(_operation(getattr(ops, name)) for name in (*(name.replace("GeGLU", "GEGLU") for name in GATED), *PLAIN, "ClampedSwiGLU", "SiTUGLU")),
    _operation(ops.AddExtraInput, extra=lambda: {"extra": tokens()}),
    _operation(ops.MakeExtraOutput),
    _operation(ops.Linear, WIDTH, WIDTH),
    _operation(ops.BasicLinear, WIDTH, WIDTH),
    _operation(ops.Bias, WIDTH),
    _operation(ops.ConstantScale, 2.0),
    _operation(ops.Dropout, 0.5),
    _operation(ops.GroupedLinear, 2, WIDTH, WIDTH, extra=_sizes),
    _operation(ops.GroupedLinear, 2, WIDTH, WIDTH, scale_bias=True, extra=lambda: {**_sizes(), **_scales()}),
    _operation(ops.GroupedLinear, 2, WIDTH, WIDTH, single_grouped_weight=True, extra=_sizes),
    _operation(ops.Identity),
    _operation(ops.L2Normalization),
    _operation(ops.LayerNorm, WIDTH),
    _operation(ops.RMSNorm, WIDTH),
    _operation(ops.Quantize, True, True),
    _operation(ops.Reshape, (2, 16, -1)),
    *(_operation(getattr(ops, name), extra=_scales) for name in ("ScaledClampedQGeGLU", "ScaledSReLU", "ScaledSiTUGLU", "ScaledSwiGLU")),
    _operation(ops.ScaledTanhSReLU, tanh_clamp_scale=2.0, extra=_scales),
    *(_operation(getattr(ops, name)) for name in ("AllGather", "AllReduce", "ReduceScatter")),
    Subject(
        "Sequential",
        lambda: ops.Sequential(ops.LayerNorm(WIDTH), ops.Linear(WIDTH, 2 * WIDTH), ops.SwiGLU(), ops.AddExtraInput()),
        lambda: {"x": tokens(), "extra": tokens()},
    ),
]


RECIPES: dict[str, quantized.Recipe | None] = {
    "none": None,
    "delayed": fusible.DelayedScaling(),
    "current": fusible.Float8CurrentScaling(),
    "mxfp8": fusible.MXFP8BlockScaling(),
    "block": fusible.Float8BlockScaling(),
    "nvfp4": fusible.NVFP4BlockScaling(),
}


def classes_of(room: Any) -> set[str]:
    """The public classes of a room that can be called as modules; abstract ones aside, and the loss, which has tests of its own."""
    abstract = {pytorch.BaseModule, ops.BasicOperation, ops.FusedOperation, ops.FusibleOperation, pytorch.CrossEntropyLoss}
    named = {name: getattr(room, name) for name in room.__all__}
    return {name for name, value in named.items() if isinstance(value, type) and issubclass(value, nn.Module) and value not in abstract}
