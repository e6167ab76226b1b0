"""NVIDIA's modules and ours of the same names, shared by two processes: what is compared in each."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from te_client import package
from te_twins import RECIPES, Twin, compare

__all__ = ["JOBS", "compared"]

HIDDEN, FFN, HEADS, SEQUENCE, BATCH = 128, 256, 4, 32, 2
ROWS = (64, HIDDEN)
ENDS = (0, 20, 52, 64)
MLP: dict[str, Any] = {"set_parallel_mode": True, "normalization": "RMSNorm", "activation": "swiglu"}
_PARTS: dict[str, Any] = {"attention_dropout": 0.0, "set_parallel_mode": True, "fuse_qkv_params": True}
ATTENTION: dict[str, Any] = {**_PARTS, "input_layernorm": True, "num_gqa_groups": 2}
LAYER: dict[str, Any] = {**_PARTS, "hidden_dropout": 0.0}


def packed(module: Any, x: torch.Tensor) -> Any:
    """Sequences one after another."""
    ends = torch.tensor(ENDS, dtype=torch.int32)
    return module(x, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=32, max_seqlen_kv=32)


def twin(name: str, arguments: tuple[Any, ...], products: int, sequence: bool, *, shape: tuple[int, ...] = ROWS, **options: Any) -> Twin:
    """A twin in parts: with ``sequence`` the processes share out the rows, too, of what they do not share out the columns of."""
    given = {"tp_group": dist.group.WORLD, "tp_size": 2, "sequence_parallel": sequence, **options}
    call = packed if options.get("qkv_format", options.get("attn_input_format")) == "thd" else (lambda module, x: module(x))
    return Twin(name, arguments, given, products, shape, call)


def cases() -> Iterator[tuple[str, Twin]]:
    for sequence in (False, True):
        half = tuple(size // 2 if sequence and at == 0 else size for at, size in enumerate((SEQUENCE, BATCH, HIDDEN)))
        yield f"column {sequence}", twin("Linear", (HIDDEN, 192), 1, sequence, parallel_mode="column")
        yield f"row {sequence}", twin("Linear", (HIDDEN, 192), 1, sequence, parallel_mode="row", shape=(64, HIDDEN // 2))
        yield f"normalized column {sequence}", twin("LayerNormLinear", (HIDDEN, 192), 1, sequence, parallel_mode="column", return_bias=True)
        yield f"mlp {sequence}", twin("LayerNormMLP", (HIDDEN, FFN), 2, sequence, **MLP)
        yield f"attention {sequence}", twin("MultiheadAttention", (HIDDEN, HEADS), 4, sequence, shape=half, **ATTENTION)
        yield f"layer {sequence}", twin("TransformerLayer", (HIDDEN, FFN, HEADS), 10, sequence, shape=half, **LAYER)
    rows = {**LAYER, "attn_input_format": "thd", "self_attn_mask_type": "padding_causal"}
    yield "packed layer False", twin("TransformerLayer", (HIDDEN, FFN, HEADS), 10, False, **rows)
    yield "packed layer True", twin("TransformerLayer", (HIDDEN, FFN, HEADS), 10, True, shape=(32, HIDDEN), **rows)


NAMES = tuple(
    f"{kind} {sequence}" for kind in ("column", "row", "normalized column", "mlp", "attention", "layer", "packed layer") for sequence in (False, True)
)
QUANTIZED = ("mlp True", "layer True", "column True", "row True")
JOBS = [(name, recipe) for name in NAMES for recipe in (RECIPES if name in QUANTIZED else RECIPES[:1])]


def compared(name: str, recipe: str, rank: int) -> bool:
    """NVIDIA's and ours on the same part of the weights and rows, of which each process has its own."""
    with package() as te, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(rank)
        compare(te, dict(cases())[name], recipe, seed=100 * rank)
    return True
