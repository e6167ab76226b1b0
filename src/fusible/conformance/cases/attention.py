"""Records of attention: each score and each sum written out in float64 from what is given to the call, O and Stats of the forward included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.table import Output, Sample, random, record
from fusible.tex.enums import (
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)

__all__ = []

_SCALE = 0.3
_HEADS, _WIDTH = 4, 16


@dataclass(frozen=True)
class Problem:
    """Sequences of equal lengths in ``[b, s, h, d]`` or ``[s, b, h, d]``, or of the lengths given in ``[t, h, d]``."""

    label: str
    layout: NVTE_QKV_Layout
    causal: bool = False
    groups: int = _HEADS
    lengths: tuple[int, ...] = (8, 8)
    scale: float = _SCALE
    window: tuple[int, int] = (-1, -1)
    off_by_one: bool = False

    @property
    def packed(self) -> bool:
        return self.layout == NVTE_QKV_Layout.NVTE_THD_THD_THD

    @property
    def mask(self) -> NVTE_Mask_Type:
        name = {(0, 0): "NO", (0, 1): "CAUSAL", (1, 0): "PADDING", (1, 1): "PADDING_CAUSAL"}[self.packed, self.causal]
        return NVTE_Mask_Type[f"NVTE_{name}_MASK"]

    def join(self, sequences: list[Tensor]) -> Tensor:
        """Sequences ``[s, h, d]`` in the layout's memory."""
        if self.packed:
            return torch.cat(sequences)
        return torch.stack(sequences, 1 if self.layout == NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD else 0)

    def statistics(self, sequences: list[Tensor]) -> Tensor:
        """One value per head and query, each ``[h, s]``, as the interface lays them: ``[b, h, s, 1]`` or ``[t, h, 1]``."""
        return torch.cat([x.T for x in sequences])[..., None] if self.packed else torch.stack(sequences)[..., None]


_PROBLEMS = (
    Problem("bshd", NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD),
    Problem("sbhd causal", NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD, causal=True),
    Problem("bshd causal, two kv heads", NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, causal=True, groups=2),
    Problem("thd causal", NVTE_QKV_Layout.NVTE_THD_THD_THD, causal=True, lengths=(5, 2, 7)),
    Problem("thd", NVTE_QKV_Layout.NVTE_THD_THD_THD, lengths=(40, 33)),
    Problem("bshd window, another scale", NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, scale=-0.2, window=(2, 1)),
    Problem("sbhd off by one", NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD, causal=True, off_by_one=True),
)


def scores(problem: Problem, q: Tensor, k: Tensor) -> Tensor:
    """``[h, i, j]`` of one sequence; what is hidden is -inf."""
    s = problem.scale * torch.einsum("ihd,jhd->hij", q.double(), k.double().repeat_interleave(_HEADS // problem.groups, 1))
    ahead = torch.arange(s.shape[2])[None] - torch.arange(s.shape[1])[:, None]
    left, right = (n if n >= 0 else s.shape[2] for n in problem.window)
    return s.masked_fill((ahead > (0 if problem.causal else right)) | (ahead < -left), -torch.inf)


@dataclass
class Given:
    """The operands of a problem, a tensor per sequence."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    arguments: dict[str, Any]


def given(problem: Problem, generator: torch.Generator, dtype: torch.dtype) -> Given:
    q, k, v = ([random(generator, (n, heads, _WIDTH), dtype) for n in problem.lengths] for heads in (_HEADS, problem.groups, problem.groups))
    counts = torch.tensor([0, *problem.lengths]).cumsum(0).to(torch.int32) if problem.packed else None
    unset = NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET
    arguments = {
        "max_seqlen_q": max(problem.lengths), "max_seqlen_kv": max(problem.lengths), "attn_scale": problem.scale, "p_dropout": 0.0, "set_zero": True,
        "qkv_layout": problem.layout, "o_format": unset, "qkv_scale_inv_format": unset, "bias_type": NVTE_Bias_Type.NVTE_NO_BIAS,
        "attn_mask_type": problem.mask, "window_size": [*problem.window],
        "softmax_type": NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX if problem.off_by_one else NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
        "bottom_right_diagonal": False, "cu_seqlens_q": counts, "cu_seqlens_kv": counts, "Q": problem.join(q), "K": problem.join(k),
        "V": problem.join(v), "fake_dtype": dtype, "cu_seqlens_q_padded": None, "cu_seqlens_kv_padded": None, "s_quantizer": None,
        "cuda_graph": False,
    }  # fmt: skip
    return Given(q, k, v, arguments)


def forward(problem: Problem, x: Given) -> tuple[list[Tensor], list[Tensor]]:
    """``(O [s, h, d], Stats [h, s])`` per sequence."""
    outputs, statistics = [], []
    for q, k, v in zip(x.q, x.k, x.v, strict=True):
        s = scores(problem, q, k)
        statistics.append(torch.logsumexp(torch.nn.functional.pad(s, (0, int(problem.off_by_one))), -1))
        values = v.double().repeat_interleave(_HEADS // problem.groups, 1)
        outputs.append(torch.einsum("hij,jhe->ihe", torch.exp(s - statistics[-1][..., None]), values))
    return outputs, statistics


def rounding(dtype: torch.dtype, largest: float, length: int) -> float:
    """The magnitude that stands for rounding probabilities, at most 1, to the operands' type, which a backend may do."""
    return 8.0 + 0.5 * torch.finfo(dtype).eps * largest / torch.finfo(torch.float32).eps / (length + 16)


@record("fused_attn_fwd")
def fused_attn_fwd(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for problem in _PROBLEMS:
        x = given(problem, generator, dtype)
        outputs, statistics = forward(problem, x)
        more = {
            "is_training": True, "page_table_k": None, "page_table_v": None, "o_quantizer": None, "Bias": None, "SoftmaxOffset": None,
            "rng_gen": None, "rng_elts_per_thread": 0, "return_max_logit": False,
        }  # fmt: skip
        length = _WIDTH + max(problem.lengths)
        size = rounding(dtype, max(v.abs().max().item() for v in x.v), length)
        o = Output(0, problem.join(outputs), dtype, length, size)
        stats = Output(1, problem.statistics(statistics), torch.float32, length, 8.0)
        yield Sample(problem.label, {**x.arguments, **more}, (o, stats, Output("result.2.shape", torch.Size([2]))))


def gradients(problem: Problem, operands: tuple[Tensor, ...], o: Tensor, stats: Tensor, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``(dQ, dK, dV)`` of one sequence from its rounded O and Stats."""
    q, k, v = (t.double() for t in operands)
    share = _HEADS // problem.groups
    p = torch.exp(scores(problem, q, k) - stats.double()[..., None])
    dp = torch.einsum("ihe,jhe->hij", do.double(), v.repeat_interleave(share, 1))
    ds = p * (dp - (do.double() * o.double()).sum(-1).T[..., None])

    def grouped(x: Tensor) -> Tensor:
        return x.unflatten(1, (problem.groups, share)).sum(2)

    dq = problem.scale * torch.einsum("hij,jhd->ihd", ds, k.repeat_interleave(share, 1))
    return dq, grouped(problem.scale * torch.einsum("hij,ihd->jhd", ds, q)), grouped(torch.einsum("hij,ihe->jhe", p, do.double()))


@record("fused_attn_bwd")
def fused_attn_bwd(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    unset = NVTE_QKV_Format.NVTE_QKV_Format_NOT_SET
    for problem in _PROBLEMS:
        x = given(problem, generator, dtype)
        wide, statistics = forward(problem, x)
        o, stats = [t.to(dtype) for t in wide], [t.float() for t in statistics]
        do = [random(generator, tuple(t.shape), dtype) for t in o]
        each = [gradients(problem, t, *rest) for *rest, t in zip(o, stats, do, zip(x.q, x.k, x.v, strict=True), strict=True)]
        more = {
            "do_format": unset, "dqkv_layout": problem.layout, "do_scale_inv_format": unset, "deterministic": True, "O": problem.join(o),
            "dO": problem.join(do), "Aux_CTX_Tensors": [problem.statistics(stats), torch.zeros(2, dtype=torch.int64)], "dp_quantizer": None,
            "dqkv_quantizer": None,
        }  # fmt: skip
        length = _WIDTH + max(problem.lengths) * (_HEADS // problem.groups)
        # Probabilities and their gradients may be rounded to the operands' type before they are multiplied.
        size = 8.0 + rounding(dtype, max(abs(t).max().item() for parts in each for t in parts) * max(problem.lengths), length)
        parts = [Output(i, problem.join([t[i] for t in each]), dtype, length, size) for i in range(3)]
        yield Sample(problem.label, {**x.arguments, **more}, (*parts, Output(3, None), Output(4, None)))


@record("get_fused_attn_backend", dtypes=(torch.float32,))
def support_query(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """The answer is the backend's own; that it is one of the enumeration, with a reason, is not."""

    def pair(result: Any, arguments: dict[str, Any]) -> Any:
        fits = isinstance(result[0], NVTE_Fused_Attn_Backend) and isinstance(result[1], str) and len(result) == 2
        return result if fits else "(NVTE_Fused_Attn_Backend, reason)"

    asked = SimpleNamespace(
        is_training=True, deterministic=False, cuda_graph=False, return_max_logit=False, attn_mask_type=NVTE_Mask_Type.NVTE_CAUSAL_MASK,
        bias_type=NVTE_Bias_Type.NVTE_NO_BIAS, window_size_left=-1, window_size_right=0, bottom_right_diagonal=False,
        softmax_type=NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX, scaling_mode=100, dropout=0.0, attn_scale=_SCALE, qkv_dtype=6, o_dtype=6, do_dtype=6,
        dqkv_dtype=6, qkv_layout=NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, o_format=NVTE_QKV_Format.NVTE_BSHD, do_format=NVTE_QKV_Format.NVTE_BSHD,
        dqkv_layout=NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, qkv_scale_inv_format=8, do_scale_inv_format=8, batch_size=2, num_attn_heads=4,
        num_gqa_groups=4, head_dim_qk=64, head_dim_v=64, max_seqlen_q=8, max_seqlen_kv=8, num_tokens_q=16, num_tokens_kv=16, num_pages_k=0,
        num_pages_v=0, page_size_k=0, page_size_v=0, max_pages_per_seq_k=0, max_pages_per_seq_v=0, bias_batch_size=0, bias_num_heads=0,
        bias_seqlen_q=0, bias_seqlen_kv=0,
    )  # fmt: skip
    yield Sample("causal", {"fused_attn_params": asked}, (Output(None, pair),))


@record("copy_to_kv_cache")
def copy_to_kv_cache(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    new, cached, page, each = (3, 0, 1, 5), (3, 4, 11, 9), 4, 3

    def counts(lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)

    pages = len(new) * each + 1
    table = torch.randperm(pages, generator=generator)[: pages - 1].view(len(new), each).int()
    news = [random(generator, (sum(new), 2, 44), dtype) for _ in range(2)]
    caches = [random(generator, (pages, page, 2, 44), dtype) for _ in range(2)]
    wanted = [cache.clone() for cache in caches]
    for cache, tokens in zip(wanted, news, strict=True):
        place = 0
        for i, count in enumerate(new):
            for position in range(cached[i] - count, cached[i]):
                cache[table[i, position // page], position % page] = tokens[place]
                place += 1
    arguments = {
        "new_k": news[0], "new_v": news[1], "k_cache": caches[0], "v_cache": caches[1], "page_table": table, "cu_new_lens": counts(new),
        "cu_cached_lens": counts(cached), "kv_format": NVTE_QKV_Format.NVTE_THD, "b": len(new), "max_ctx_len": max(new),
        "max_seq_len": page * each, "max_pages_per_seq": each, "is_non_paged": False,
    }  # fmt: skip
    yield Sample("pages", arguments, (Output("k_cache", wanted[0]), Output("v_cache", wanted[1])))
