"""An attention call, checked and made into what the arithmetic takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.errors import NotServedError, ShapeError, expected
from fusible.tex.backends.torch_backend.attention_layout import Layout, Piece, empty_in_format, heads_first, layout, take
from fusible.tex.backends.torch_backend.attention_math import Scores
from fusible.tex.enums import NVTE_Bias_Type, NVTE_QKV_Layout, NVTE_Softmax_Type
from fusible.tex.protocol import is_quantized

__all__ = ["auxiliary", "check", "draw_rng_state", "make_scores", "operands", "outputs", "refusal"]

_FLOATING = frozenset({torch.float32, torch.bfloat16, torch.float16})


def refusal(qkv_layout: Any, bias_type: Any, dtype: torch.dtype) -> str | None:
    """Why a problem is not served, or None."""
    if layout(qkv_layout) is None:
        return f"layout {NVTE_QKV_Layout(int(qkv_layout)).name} is not served; sbhd, bshd, bhsd and thd are, packed or separate"
    if int(bias_type) == NVTE_Bias_Type.NVTE_ALIBI:
        return "ALiBi is not served; no bias, a pre-scale and a post-scale bias are"
    if dtype not in _FLOATING:
        return f"{dtype} is not served; float32, bfloat16 and float16 are"
    return None


def check(qkv_layout: Any, bias_type: Any, q: Any, k: Any, v: Any, quantizers: tuple[Any, ...], page_table: Any) -> Layout:
    """The layout of a problem that this backend serves. Raises ``NotServedError`` with the reason, ``ShapeError`` for shapes that do not fit."""
    quantized = any(is_quantized(x) for x in (q, k, v)) or any(quantizer is not None for quantizer in quantizers)
    reason = "FP8 attention is not served; bfloat16, float16 and float32 are" if quantized else refusal(qkv_layout, bias_type, q.dtype)
    if reason is None and page_table is not None:
        reason = "a paged KV cache is not served"
    lay = layout(qkv_layout)
    if reason is not None or lay is None:
        raise NotServedError(expected("a problem it serves", of="the torch backend's attention", got=f"one where {reason}", do="change that"))
    for name, x, dims in (("Q", q, lay.q), ("K", k, lay.kv), ("V", v, lay.kv)):
        if x.dim() != len(dims):
            raise ShapeError(expected(f"[{', '.join(dims.lower())}]", of=f"{name} of attention", got=list(x.shape), do="reshape it"))
    if q.shape[lay.q.index("H")] % k.shape[lay.kv.index("H")] or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        shapes = f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        raise ShapeError(
            expected(
                "equal widths of Q and K, equal tokens of K and V, Q's heads a multiple of theirs", of="attention", got=shapes, do="reshape them"
            )
        )
    return lay


def draw_rng_state(device: torch.device, dropout: float, generator: torch.Generator | None) -> Tensor:
    """``(seed, offset)``; drawn only where dropout needs it."""
    if not dropout:
        return torch.zeros(2, dtype=torch.int64, device=device)
    source = device if generator is None else generator.device
    seed = torch.randint(0, 1 << 62, (1,), dtype=torch.int64, generator=generator, device=source)
    return torch.cat((seed, torch.zeros_like(seed))).to(device)


def make_scores(
    scale: float, mask: Any, window: Sequence[int] | None, diagonal: bool, bias_type: Any, bias: Tensor | None, softmax: Any, offset: Tensor | None,
    dropout: float, rng_state: Tensor, max_sq: int, max_skv: int, q: Tensor,
) -> Scores:  # fmt: skip
    """The rules of one attention problem. Raises ``ShapeError`` where a bias or an offset that its types ask for is missing."""
    has_bias = int(bias_type) != NVTE_Bias_Type.NVTE_NO_BIAS
    learnable = int(softmax) == NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX
    for wanted, given, name in ((has_bias, bias, "Bias"), (learnable, offset, "SoftmaxOffset")):
        if wanted and given is None:
            raise ShapeError(expected(f"a {name} tensor", of="attention of that type", got="None", do=f"pass {name}"))
    left, right = (-1, -1) if window is None else (int(window[0]), int(window[1]))
    return Scores(
        float(scale), int(mask), (left, right), bool(diagonal), int(bias_type), bias if has_bias else None, int(softmax),
        offset if learnable else None, float(dropout), rng_state, int(max_sq), int(max_skv),
    )  # fmt: skip


def outputs(lay: Layout, name: str, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, str]:
    """Zeroed O, and Stats and Max of -inf, with the format of the latter two."""
    if lay.q == "THD":
        rows = torch.zeros(*q.shape[:2], 1, device=q.device)
        return torch.zeros(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device), rows, torch.zeros_like(rows), "THD"
    b, h, s, _ = heads_first(q, lay.q).shape
    rows = torch.zeros(b, h, s, 1, device=q.device)
    return empty_in_format((b, h, s, v.shape[-1]), name, q), rows, torch.zeros_like(rows), "BHSD"


def operands(lay: Layout, piece: Piece, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V of one piece."""
    return take(q, lay.q, piece, kv=False), take(k, lay.kv, piece, kv=True), take(v, lay.kv, piece, kv=True)


def auxiliary(tensors: Sequence[Tensor], bias_type: Any, softmax_type: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """``(Stats, rng_state, Bias, SoftmaxOffset)`` of what forward returned."""
    has_bias = int(bias_type) != NVTE_Bias_Type.NVTE_NO_BIAS
    learnable = int(softmax_type) == NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX
    count = 2 + has_bias + learnable
    if len(tensors) != count:
        do = "pass what the forward returned after O, without Max"
        raise ShapeError(expected(f"{count} tensors", of="Aux_CTX_Tensors", got=len(tensors), do=do))
    rest = list(tensors[2:])
    return tensors[0], tensors[1], rest.pop(0) if has_bias else None, rest.pop(0) if learnable else None
