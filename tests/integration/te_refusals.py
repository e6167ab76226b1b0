"""Right calls of the public classes and functions of NVIDIA's package, from which wrong ones are made, for that package and for ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from te_public import Side

__all__ = ["CALLED", "MADE", "Subject"]

ROWS = WIDTH = 32


class Subject(NamedTuple):
    """``get(side)`` gives what is called; ``arguments()`` those of a right call, by their names or, of tensors that have none, their places."""

    get: Callable[[Side], Any]
    arguments: Callable[[], dict[Any, Any]]


def _values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _rows() -> torch.Tensor:
    return _values(ROWS, WIDTH).requires_grad_()


def _parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


def _named(side: Side, path: str) -> Any:
    for name in path.split("."):
        side = getattr(side, name)
    return side


_MADE: dict[str, Callable[[], tuple[Any, ...]]] = {
    "Linear": lambda: (WIDTH, WIDTH),
    "LayerNorm": lambda: (WIDTH,),
    "RMSNorm": lambda: (WIDTH,),
    "LayerNormLinear": lambda: (WIDTH, WIDTH),
    "LayerNormMLP": lambda: (WIDTH, 64),
    "GroupedLinear": lambda: (2, WIDTH, WIDTH),
    "DotProductAttention": lambda: (2, 16),
    "MultiheadAttention": lambda: (WIDTH, 2),
    "TransformerLayer": lambda: (WIDTH, 64, 2),
    "RotaryPositionEmbedding": lambda: (16,),
    "Fp8Padding": lambda: (2,),
    "Fp8Unpadding": lambda: (2,),
    "ops.Linear": lambda: (WIDTH, WIDTH),
    "ops.BasicLinear": lambda: (WIDTH, WIDTH),
    "ops.Bias": lambda: (WIDTH,),
    "ops.LayerNorm": lambda: (WIDTH,),
    "ops.RMSNorm": lambda: (WIDTH,),
    "ops.GroupedLinear": lambda: (2, WIDTH, WIDTH),
    "ops.Dropout": lambda: (0.5,),
    "ops.ConstantScale": lambda: (2.0,),
    "ops.Reshape": lambda: ((-1, 16),),
    **dict.fromkeys(("ops.L2Normalization", "ops.Quantize", "ops.AddExtraInput", "ops.GELU", "ops.SwiGLU", "ops.ClampedSwiGLU"), lambda: ()),
    **dict.fromkeys(("ops.ScaledSwiGLU", "ops.AllGather", "ops.AllReduce", "ops.ReduceScatter"), lambda: ()),
    **dict.fromkeys(("recipe.DelayedScaling", "recipe.Float8CurrentScaling", "recipe.MXFP8BlockScaling", "recipe.Float8BlockScaling"), lambda: ()),
    **dict.fromkeys(("recipe.NVFP4BlockScaling", "recipe.MMParams", "recipe.QParams"), lambda: ()),
    "recipe.CustomRecipe": lambda: (lambda role: None,),
    "optimizers.FusedAdam": lambda: (_parameters(),),
    "optimizers.FusedSGD": lambda: (_parameters(), 1e-3),
}
"""By the name of a class: the arguments by place that it must be made with."""

MADE = {name: Subject(lambda side, name=name: _named(side, name), lambda: {}) for name in _MADE}
"""Classes: whatever is wrong in their constructors. ``arguments`` are those of ``_MADE`` by the names of the package's signature."""


def _attended() -> dict[Any, Any]:
    q, k, v = (_values(8, 2, 2, 16, dtype=torch.bfloat16) for _ in "qkv")
    return {
        "query_layer": q, "key_layer": k, "value_layer": v, "attention_mask": None, "qkv_format": "sbhd", "cu_seqlens_q": None,
        "cu_seqlens_kv": None, "max_seqlen_q": None, "attn_mask_type": "causal", "window_size": None, "core_attention_bias_type": "no_bias",
        "core_attention_bias": None, "alibi_slopes": None,
    }  # fmt: skip


def _hidden(mask: str) -> dict[Any, Any]:
    more = {"window_size": None, "encoder_output": None, "rotary_pos_emb": None, "core_attention_bias_type": "no_bias"}
    return {"hidden_states": _values(8, 2, WIDTH), "attention_mask": None, mask: "causal", **more}


_CALLED: dict[str, Callable[[], dict[Any, Any]]] = {
    "Linear": lambda: {"inp": _rows(), "is_first_microbatch": None},
    "LayerNorm": lambda: {"input": _rows()},
    "RMSNorm": lambda: {"input": _rows()},
    "LayerNormLinear": lambda: {"inp": _rows(), "is_first_microbatch": None},
    "LayerNormMLP": lambda: {"inp": _rows(), "is_first_microbatch": None},
    "GroupedLinear": lambda: {"inp": _rows(), "m_splits": [16, 16], "is_first_microbatch": None},
    "DotProductAttention": _attended,
    "MultiheadAttention": lambda: _hidden("attn_mask_type"),
    "TransformerLayer": lambda: _hidden("self_attn_mask_type"),
    "RotaryPositionEmbedding": lambda: {"max_seq_len": 8, "offset": 0},
    "Fp8Padding": lambda: {"inp": _values(6, WIDTH), "m_splits": [2, 4]},
    "Fp8Unpadding": lambda: {"inp": _values(32, WIDTH), "m_splits": [2, 4]},
    **dict.fromkeys(("ops.Linear", "ops.BasicLinear", "ops.Bias", "ops.LayerNorm", "ops.RMSNorm"), lambda: {"input": _rows()}),
    **dict.fromkeys(("ops.L2Normalization", "ops.Dropout", "ops.ConstantScale", "ops.GELU", "ops.SwiGLU"), lambda: {"input": _rows()}),
    **dict.fromkeys(("ops.Quantize", "ops.Reshape"), lambda: {"input": _rows()}),
    "ops.GroupedLinear": lambda: {0: _rows(), 1: torch.tensor([16, 16])},
    "ops.AddExtraInput": lambda: {0: _rows(), 1: _rows()},
    "ops.ScaledSwiGLU": lambda: {0: _rows(), 1: torch.ones(ROWS)},
}
"""By the name of a class: the arguments of a call of one that is made as by ``_MADE``."""

_FUNCTIONS: dict[str, Callable[[], dict[Any, Any]]] = {
    "moe_permute": lambda: {
        "inp": _values(16, WIDTH), "routing_map": torch.zeros(16, 2, dtype=torch.int32), "num_out_tokens": 0, "max_token_num": -1,
        "map_type": "index",
    },
    "parallel_cross_entropy": lambda: {
        "inp": _values(2, 4, WIDTH), "target": torch.zeros(2, 4, dtype=torch.int64), "label_smoothing": 0.0, "reduce_loss": False,
    },
    "autocast": lambda: {"enabled": True, "recipe": None, "amax_reduction_group": None},
    "quantized_model_init": lambda: {"enabled": True, "recipe": None, "preserve_high_precision_init_val": False},
}  # fmt: skip

CALLED = {
    **{name: Subject(lambda side, name=name: _named(side, name)(*_MADE[name]()), arguments) for name, arguments in _CALLED.items()},
    **{name: Subject(lambda side, name=name: _named(side, name), arguments) for name, arguments in _FUNCTIONS.items()},
}
"""Modules, operations and functions: whatever is wrong in a call."""


def made_with(name: str) -> tuple[Any, ...]:
    """The arguments by place that a class of ``MADE`` must be made with."""
    return _MADE[name]()
