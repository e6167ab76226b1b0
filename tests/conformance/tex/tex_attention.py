"""Attention in float64, one sequence at a time, with the mask written out per pair of positions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from tex_backends import Runner
from torch import Tensor

from fusible.tex import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_QKV_Format, NVTE_QKV_Layout, NVTE_Softmax_Type

M, L, F, B, S = NVTE_Mask_Type, NVTE_QKV_Layout, NVTE_QKV_Format, NVTE_Bias_Type, NVTE_Softmax_Type
CAUSAL = {M.NVTE_CAUSAL_MASK, M.NVTE_PADDING_CAUSAL_MASK}
BOTTOM_RIGHT = {M.NVTE_CAUSAL_BOTTOM_RIGHT_MASK, M.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK}
PADDING = {M.NVTE_PADDING_MASK, M.NVTE_PADDING_CAUSAL_MASK, M.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK}


@dataclass(frozen=True)
class Problem:
    """A call of fused attention; lengths are those of the sequences, in tokens."""

    layout: NVTE_QKV_Layout = L.NVTE_BSHD_BSHD_BSHD
    mask: NVTE_Mask_Type = M.NVTE_NO_MASK
    softmax: NVTE_Softmax_Type = S.NVTE_VANILLA_SOFTMAX
    bias_type: NVTE_Bias_Type = B.NVTE_NO_BIAS
    window: tuple[int, int] = (-1, -1)
    bottom_right_diagonal: bool = False
    dropout: float = 0.0
    heads: int = 4
    groups: int = 4
    width: int = 8
    width_v: int = 8
    lengths_q: tuple[int, ...] = (5, 5)
    lengths_kv: tuple[int, ...] = (5, 5)
    gap: int = 0
    dtype: torch.dtype = torch.float32
    scale: float = 0.3
    o_format: NVTE_QKV_Format = F.NVTE_QKV_Format_NOT_SET
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def max_q(self) -> int:
        return max(self.lengths_q)

    @property
    def max_kv(self) -> int:
        return max(self.lengths_kv)

    @property
    def formats(self) -> tuple[str, str]:
        parts = self.layout.name.removeprefix("NVTE_").split("_")
        letters = ["".join(c for c in part if c.isalpha()) for part in parts]
        return letters[0], letters[-1]


def cumulative(lengths: tuple[int, ...], gap: int = 0) -> Tensor:
    return torch.tensor([0, *torch.tensor([n + gap for n in lengths]).cumsum(0).tolist()], dtype=torch.int32)


def join(sequences: list[Tensor], name: str, gap: int) -> Tensor:
    """Sequences ``[s_i, h, d]`` in a memory format, padded with large numbers that no result may depend on."""
    if name == "THD":
        return torch.cat([torch.nn.functional.pad(x, (0, 0, 0, 0, 0, gap), value=77.0) for x in sequences])
    longest = max(x.shape[0] for x in sequences)
    batch = torch.stack([torch.nn.functional.pad(x, (0, 0, 0, 0, 0, longest - x.shape[0]), value=77.0) for x in sequences])
    return {"BSHD": batch, "SBHD": batch.transpose(0, 1).contiguous(), "BHSD": batch.transpose(1, 2).contiguous()}[name]


def cut(x: Tensor, name: str, lengths: tuple[int, ...], gap: int) -> list[Tensor]:
    """The inverse of ``join``."""
    if name == "THD":
        starts = cumulative(lengths, gap).tolist()
        return [x[start : start + n] for start, n in zip(starts, lengths, strict=False)]
    batch = {"BSHD": x, "SBHD": x.transpose(0, 1), "BHSD": x.transpose(1, 2)}[name]
    return [batch[i, :n] for i, n in enumerate(lengths)]


def visible(problem: Problem, sq: int, skv: int) -> Tensor:
    end = skv - sq
    left, right = problem.window
    seen = torch.zeros(sq, skv, dtype=torch.bool)
    for i in range(sq):
        for j in range(skv):
            diagonal = i + (end if problem.bottom_right_diagonal else 0)
            seen[i, j] = (
                (problem.mask not in CAUSAL or j <= i)
                and (problem.mask not in BOTTOM_RIGHT or j <= i + end)
                and (left < 0 or j >= diagonal - left)
                and (right < 0 or j <= diagonal + right)
            )
    return seen


def alibi(problem: Problem, sq: int, skv: int) -> Tensor:
    """``[h, sq, skv]``: a head's slope times the distance from the diagonal, less than 0."""
    n = 2 ** int(math.log2(problem.heads))
    slopes = [2.0 ** (-8 * (i + 1) / n) for i in range(n)] + [2.0 ** (-8 * (2 * i + 1) / (2 * n)) for i in range(problem.heads - n)]
    diagonal = torch.arange(sq)[:, None] + (skv - sq if problem.bottom_right_diagonal else 0)
    distance = (diagonal - torch.arange(skv)).abs()
    return -torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance


def reference(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, offset: Tensor | None, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One sequence, ``[s, h, d]`` each: ``(O [sq, h, e], Stats [h, sq])``; differentiable."""
    repeat = problem.heads // problem.groups
    if bias is not None:
        bias = bias.expand(problem.heads, problem.max_q, problem.max_kv)
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(repeat, 1))
    if bias is not None and problem.bias_type == B.NVTE_PRE_SCALE_BIAS:
        scores = scores + bias[:, : q.shape[0], : k.shape[0]]
    scores = scores * problem.scale
    if bias is not None and problem.bias_type == B.NVTE_POST_SCALE_BIAS:
        scores = scores + bias[:, : q.shape[0], : k.shape[0]]
    if problem.bias_type == B.NVTE_ALIBI:
        scores = scores + alibi(problem, q.shape[0], k.shape[0])
    scores = scores.masked_fill(~visible(problem, q.shape[0], k.shape[0]), -torch.inf)
    stats = torch.logsumexp(scores, -1) if k.shape[0] else scores.new_full((problem.heads, q.shape[0]), -torch.inf)
    if offset is not None:
        stats = torch.logaddexp(stats, offset.view(-1, 1).expand_as(stats))
    p = torch.exp(scores - torch.where(stats == -torch.inf, 0.0, stats)[..., None])
    if keep is not None:
        p = p * keep[:, : q.shape[0], : k.shape[0]] / (1 - problem.dropout)
    return torch.einsum("hij,jhe->ihe", p, v.repeat_interleave(repeat, 1)), stats


@dataclass
class Tensors:
    """The sequences of a problem, and the tensors that they make."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    bias: Tensor | None
    offset: Tensor | None
    packed: tuple[Tensor, Tensor, Tensor]


def tensors(problem: Problem, seed: int = 1) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def draw(lengths: tuple[int, ...], heads: int, width: int) -> list[Tensor]:
        return [torch.randn(n, heads, width, generator=generator).to(problem.dtype) for n in lengths]

    q = draw(problem.lengths_q, problem.heads, problem.width)
    k, v = draw(problem.lengths_kv, problem.groups, problem.width), draw(problem.lengths_kv, problem.groups, problem.width_v)
    bias = None
    if problem.bias_type not in (B.NVTE_NO_BIAS, B.NVTE_ALIBI):
        shape = problem.options.get("bias_shape", (problem.options.get("bias_batch", 1), problem.heads, problem.max_q, problem.max_kv))
        bias = torch.randn(shape, generator=generator).to(problem.dtype)
    offset = torch.randn(1, problem.heads, 1, 1, generator=generator) if problem.softmax == S.NVTE_LEARNABLE_SOFTMAX else None
    q_name, kv_name = problem.formats
    return Tensors(q, k, v, bias, offset, (join(q, q_name, problem.gap), join(k, kv_name, problem.gap), join(v, kv_name, problem.gap)))


def common(problem: Problem) -> dict[str, Any]:
    lengths = problem.mask in PADDING or "THD" in problem.formats
    return {
        "max_seqlen_q": problem.max_q,
        "max_seqlen_kv": problem.max_kv,
        "attn_scale": problem.scale,
        "p_dropout": problem.dropout,
        "set_zero": True,
        "qkv_layout": problem.layout,
        "o_format": problem.o_format,
        "qkv_scale_inv_format": F.NVTE_QKV_Format_NOT_SET,
        "bias_type": problem.bias_type,
        "attn_mask_type": problem.mask,
        "softmax_type": problem.softmax,
        "window_size": list(problem.window),
        "bottom_right_diagonal": problem.bottom_right_diagonal,
        "cu_seqlens_q": cumulative(problem.lengths_q) if lengths else None,
        "cu_seqlens_kv": cumulative(problem.lengths_kv) if lengths else None,
        "fake_dtype": problem.dtype,
        "cu_seqlens_q_padded": cumulative(problem.lengths_q, problem.gap) if problem.gap else None,
        "cu_seqlens_kv_padded": cumulative(problem.lengths_kv, problem.gap) if problem.gap else None,
        "s_quantizer": None,
        "cuda_graph": False,
    }


def forward(runner: Runner, problem: Problem, given: Tensors, **changes: Any) -> list[Any]:
    q, k, v = given.packed
    return runner(
        "fused_attn_fwd",
        **{
            **common(problem),
            "is_training": True,
            "Q": q,
            "K": k,
            "V": v,
            "page_table_k": None,
            "page_table_v": None,
            "o_quantizer": None,
            "Bias": given.bias,
            "SoftmaxOffset": given.offset,
            "rng_gen": None,
            "rng_elts_per_thread": 0,
            "return_max_logit": False,
            **changes,
        },
    )


def backward(runner: Runner, problem: Problem, given: Tensors, o: Tensor, do: Tensor, aux: list[Tensor], **changes: Any) -> list[Any]:
    q, k, v = given.packed
    return runner(
        "fused_attn_bwd",
        **{
            **common(problem),
            "do_format": problem.o_format,
            "dqkv_layout": problem.options.get("dqkv_layout", problem.layout),
            "do_scale_inv_format": F.NVTE_QKV_Format_NOT_SET,
            "deterministic": True,
            "Q": q,
            "K": k,
            "V": v,
            "O": o,
            "dO": do,
            "Aux_CTX_Tensors": aux,
            "dp_quantizer": None,
            "dqkv_quantizer": None,
            **changes,
        },
    )
