"""Special values, which kernels often get wrong, planted among the random values of the samples. The expected outputs are those of float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["OPEN", "PLANTINGS", "Planting", "TURNS", "UNPLANTED", "current_planting", "plant", "planting"]

TURNS = 3
"""Turns of each kind: every third random tensor of a call has planted values, and the turn says which ones."""


@dataclass
class Planting:
    """Values for the first, a middle and the last element of every third random tensor, so that the operands of one call do not all have them.
    ``kind``: ``"nan"``; ``"inf"`` of both signs; ``"finite"``: a zero with a sign, a subnormal number, a large one."""

    kind: str
    turn: int
    drawn: int = field(default=0, compare=False)

    def values(self, dtype: torch.dtype) -> tuple[float, ...]:
        if self.kind != "finite":
            return (math.nan,) * 3 if self.kind == "nan" else (math.inf, -math.inf, math.inf)
        # Large: beyond the range of the 8-bit types and of exp; its square is finite in float32.
        large = 6e4 if dtype is torch.float16 else 3e5
        return -0.0, torch.finfo(dtype).smallest_normal / 4, large


PLANTINGS = tuple((kind, turn) for kind in ("nan", "inf", "finite") for turn in range(TURNS))

_current: ContextVar[Planting | None] = ContextVar("planting", default=None)


@contextmanager
def planting(kind: str, turn: int) -> Iterator[Planting]:
    """Within this block, ``random`` plants special values."""
    chosen = Planting(kind, turn)
    token = _current.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(token)


def current_planting() -> Planting | None:
    """The current planting, or None."""
    return _current.get()


def plant(x: Tensor) -> Tensor:
    """``x``, with the values of the current planting if it is its turn."""
    chosen = _current.get()
    if chosen is None or not x.numel():
        return x
    place, turn = divmod(chosen.drawn, TURNS)
    chosen.drawn += 1
    if turn == chosen.turn:
        values, last = chosen.values(x.dtype), x.numel() - 1
        for i, at in enumerate((0, last // 2, last)):
            x.view(-1)[at] = values[(place + i) % len(values)]
    return x


UNPLANTED = {
    "quantize": ("nan",), "bgrad_quantize": ("nan",), "layernorm_fwd": ("inf",), "scaled_aligned_causal_masked_softmax_backward": ("nan",),
    "scaled_upper_triang_masked_softmax_backward": ("nan",), "fused_topk_with_score_function_qb_fwd": ("nan", "inf", "finite"),
}  # fmt: skip
"""Kinds that are not planted in a function's samples. For some, correct backends differ: whether NaN in a masked score or value reaches queries that
do not see it, or which NaN byte of E5M2 a NaN becomes. Others draw samples until they have no ties, which planted values would be. Where such values
have a defined result, the function has samples of their own."""

OPEN: dict[str, frozenset[str]] = {
    "nan": frozenset({
        "bgrad_group_quantize", "compute_amax", "dbias_dsrelu", "dsreglu", "dsrelu", "fused_qkv_rope_backward", "fused_qkv_rope_forward",
        "fused_rope_backward", "fused_rope_forward", "group_quantize", "group_scaled_clamped_swiglu", "group_scaled_swiglu",
        "moe_unpermute_bwd", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master", "multi_tensor_adam_fp8",
        "multi_tensor_adam_scaled", "multi_tensor_l2norm", "multi_tensor_quantize", "multi_tensor_scale", "multi_tensor_scale_tensor",
        "multi_tensor_sgd", "multi_tensor_unscale_l2norm", "nvfp4_group_quantize_with_amax", "prim_dropout", "prim_dropout_backward",
        "scaled_aligned_causal_masked_softmax_forward", "scaled_dsrelu", "scaled_masked_softmax_backward",
        "scaled_upper_triang_masked_softmax_forward", "split_quantize", "thd_out_correction", "thd_second_half_lse_correction",
    }),
    "inf": frozenset({
        "bgrad_group_quantize", "dbias_dsrelu", "dsreglu", "dsrelu", "group_quantize", "group_scaled_clamped_swiglu",
        "group_scaled_swiglu", "layernorm_fwd", "moe_unpermute_bwd", "multi_tensor_adam_capturable", "multi_tensor_adam_fp8",
        "multi_tensor_adam_scaled", "multi_tensor_l2norm", "multi_tensor_quantize", "multi_tensor_scale", "multi_tensor_scale_tensor",
        "multi_tensor_unscale_l2norm",
        "prim_dropout", "prim_dropout_backward", "scaled_aligned_causal_masked_softmax_forward", "scaled_dsrelu",
        "scaled_masked_softmax_backward", "scaled_softmax_forward", "scaled_upper_triang_masked_softmax_forward", "thd_out_correction",
    }),
    "finite": frozenset({
        "group_scaled_swiglu", "multi_tensor_adam_capturable", "multi_tensor_adam_scaled",
    }),
}  # fmt: skip
"""Functions for which float64 does not determine the result of a kind: one formula forms a product of zero and infinity and another does not, a flag
is set, or no 8-bit number is the nearest. Their results are compared with those of the torch backend."""
