"""The options of every module: right arguments of its constructor, and for each of them another value."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from subjects import WIDTH
from torch import nn

import fusible
from fusible import pytorch
from fusible.pytorch.modules.attention import SelfAttentionArguments
from fusible.pytorch.modules.linear import default_weight_init_method

__all__ = ["SUBJECTS", "Options", "modules", "options_of"]

SCORES: dict[str, Any] = {"scale": None, "soft_cap": None, "dropout": 0.0, "mask": False}
SELF: dict[str, Any] = {
    **SCORES,
    **{"causal": True, "rope_base": 10000.0, "rope_width": None, "rope_factors": (), "window_size": (-1, -1), "alibi": False},
}
OTHER_SCORES: dict[str, list[Any]] = {"scale": [0.3], "soft_cap": [1.0], "dropout": [0.5], "mask": [True]}
OTHER_SELF: dict[str, list[Any]] = {
    **OTHER_SCORES,
    **{"causal": [False], "rope_base": [10.0, None], "rope_width": [4], "rope_factors": [(0.5,) * 8, [0.25] * 8], "window_size": [(3, 0), [3, 0]]},
    **{"alibi": [True, (0.5, 0.25), torch.tensor([0.5, 0.25])]},
}
FLOATS: dict[str, list[Any]] = {"param_dtype": [torch.bfloat16], "device": ["meta"]}
NORM: dict[str, Any] = {"eps": 1e-5, "zero_centered_gamma": False, "param_dtype": None, "device": None}
OTHER_NORM: dict[str, list[Any]] = {"eps": [0.5], "zero_centered_gamma": [True], **FLOATS}


@dataclass(frozen=True)
class Options:
    """``made`` with the arguments ``good`` takes an input of ``columns``. ``others``: for each of them other values. ``live``: what may be set."""

    made: type[nn.Module]
    good: dict[str, Any]
    others: dict[str, list[Any]]
    live: frozenset[str]
    columns: int = WIDTH
    extra: bool = field(default=False)
    """Whether it takes keys and values beside x."""

    @property
    def title(self) -> str:
        return self.made.__name__


def _attention(made: type[nn.Module], sizes: dict[str, int], **others: int) -> Options:
    columns = 2 * WIDTH if made is not fusible.MultiHeadedSelfAttention and made is not fusible.DotProductAttention else 3 * WIDTH
    found = {**OTHER_SELF, **{name: [value] for name, value in others.items()}}
    return Options(made, {**sizes, **SELF}, found, frozenset(SELF) - {"mask"}, columns)


SUBJECTS = [
    Options(fusible.Dropout, {"p": 0.5}, {"p": [0.0, 0.25, torch.tensor(0.125)]}, frozenset({"p"})),
    Options(fusible.LayerNorm, {"features": WIDTH, **NORM}, {"features": [8], **OTHER_NORM}, frozenset({"eps", "zero_centered_gamma"})),
    Options(fusible.RMSNorm, {"features": WIDTH, **NORM}, {"features": [8], **OTHER_NORM}, frozenset({"eps", "zero_centered_gamma"})),
    Options(
        fusible.QKNorm,
        {"heads": 2, "head_width": 16, "groups": 2, **NORM},
        {"heads": [4], "head_width": [8], "groups": [1], **OTHER_NORM},
        frozenset({"eps", "zero_centered_gamma"}),
        3 * WIDTH,
    ),
    Options(
        fusible.Linear,
        {"in_features": WIDTH, "out_features": WIDTH, "bias": True, "param_dtype": None, "weight_init_method": default_weight_init_method}
        | {"bias_init_method": None, "device": None, "accumulate_into_main_grad": False, "high_precision": False},
        {"in_features": [16], "out_features": [16], "bias": [False], "weight_init_method": [nn.init.zeros_], "bias_init_method": [nn.init.ones_]}
        | {"accumulate_into_main_grad": [True], "high_precision": [True], **FLOATS},
        frozenset({"accumulate_into_main_grad", "high_precision"}),
    ),
    _attention(fusible.DotProductAttention, {"heads": 2, "head_width": 16, "groups": 2}, heads=4, head_width=8, groups=1),
    _attention(fusible.MultiHeadedSelfAttention, {"features": WIDTH, "heads": 2}, features=16, heads=4),
    _attention(fusible.MultiQuerySelfAttention, {"features": WIDTH, "heads": 2}, features=16, heads=4),
    _attention(fusible.GroupedQuerySelfAttention, {"features": WIDTH, "heads": 2, "groups": 1}, features=16, heads=4, groups=2),
    Options(
        fusible.CrossAttention,
        {"heads": 2, "head_width": 16, "groups": 2, **SCORES},
        {"heads": [4], "head_width": [8], "groups": [1], **OTHER_SCORES},
        frozenset(SCORES) - {"mask"},
        extra=True,
    ),
    Options(
        fusible.LatentAttention,
        {"heads": 2, "key_width": 16, "rope_width": 4, "value_width": 16, "groups": 2, "causal": True, "rope_base": 10000.0, "rope_factors": ()}
        | {"rope_interleaved": False, "rope_scale": 1.0, "scale": None},
        {"heads": [4], "key_width": [8], "rope_width": [8], "value_width": [None], "groups": [1], "causal": [False], "rope_base": [10.0]}
        | {"rope_factors": [(0.5, 0.25)], "rope_interleaved": [True], "rope_scale": [1.5], "scale": [0.3]},
        frozenset({"causal", "rope_base", "rope_factors", "rope_interleaved", "rope_scale", "scale"}),
        2 * 20 + 4 + 2 * 32,
    ),
    Options(
        fusible.MixtureOfExperts,
        {"features": WIDTH, "inner_features": WIDTH, "experts": 8, "top_k": 4, "activation": "swiglu", "normalized": True}
        | {"score_function": "softmax", "expert_bias": False, "groups": 4, "top_groups": 2, "scaling_factor": None}
        | {"router_dtype": None, "param_dtype": None, "weight_init_method": default_weight_init_method, "device": None},
        {"features": [16], "inner_features": [16], "experts": [16], "top_k": [2], "activation": ["geglu", "gelu"], "normalized": [False]}
        | {"score_function": ["sigmoid"], "expert_bias": [True, torch.ones(8)], "groups": [2], "top_groups": [4], "scaling_factor": [2.0]}
        | {"router_dtype": [torch.float32], "weight_init_method": [nn.init.zeros_], **FLOATS},
        frozenset({"top_k", "activation", "normalized", "score_function", "groups", "top_groups", "scaling_factor"}),
    ),
    Options(
        fusible.CrossEntropyLoss,
        {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "reduction": "mean", "group": None},
        {"ignore_index": [3], "label_smoothing": [0.5], "z_loss": [0.5], "reduction": ["sum", "none"], "group": ["a text"]},
        frozenset({"ignore_index", "label_smoothing", "z_loss", "reduction"}),
    ),
]


def options_of(made: type[nn.Module]) -> set[str]:
    """The names of a constructor's arguments, with those that it hands on."""
    found: set[str] = set()
    for p in list(inspect.signature(made.__init__).parameters.values())[1:]:
        if p.kind is p.VAR_KEYWORD:
            found |= set(SelfAttentionArguments.__annotations__)
        elif p.kind is not p.VAR_POSITIONAL:
            found.add(p.name)
    return found


def modules() -> dict[str, type[nn.Module]]:
    """By name the classes of ``fusible.pytorch`` that can be made and have options."""
    named = {name: getattr(pytorch, name) for name in pytorch.__all__}
    found = {name: cls for name, cls in named.items() if isinstance(cls, type) and issubclass(cls, nn.Module) and cls is not pytorch.BaseModule}
    return {name: cls for name, cls in found.items() if options_of(cls)}
