"""``DotProductAttention``: ``softmax(scale * q k^T) v`` of three tensors, with NVIDIA's masks, biases and layouts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from fusible.compat.te_modules.attention_call import BIASES, FORMATS, MASKS, SOFTMAXES, Attention, Lengths, attend
from fusible.compat.te_modules.attention_masks import bias_of, lengths_of, mask_bias, window_of
from fusible.compat.te_modules.base import device_of
from fusible.compat.te_modules.extra_state import WithExtraState
from fusible.compat.te_modules.fast_setattr import FastSetattr
from fusible.compat.te_modules.inference import InferenceParams, stepped
from fusible.compat.te_modules.parallel import Sharding, layer_name, refuse
from fusible.errors import ArgumentError, NotServedError, ShapeError, check_number, expected
from fusible.pytorch.engine.autocast import current_autocast
from fusible.pytorch.engine.refusals import check_dense
from fusible.pytorch.engine.torch_autocast import activation_of
from fusible.tex.calls.constructors import check_constructor, check_forward

__all__ = ["DotProductAttention"]


class DotProductAttention(FastSetattr, WithExtraState, nn.Module):
    """Attention of ``query_layer``, ``key_layer``, ``value_layer``: ``[s, b, h, d]`` (``qkv_format="sbhd"``), ``[b, s, h, d]`` (``"bshd"``) or
    ``[t, h, d]`` (``"thd"``, the tokens of all sequences). The output has the heads side by side, as the last dimension.

    ``kv_channels``: d, or a pair, of q and k, and of v. ``num_gqa_groups``: heads of k and v, each of which serves equally many of q's.
    ``attn_mask_type``: a mask's kind, ``"arbitrary"`` among them, with what it hides True in ``attention_mask``: scores ``[b, h, sq, skv]`` of an
    arbitrary one, tokens ``[b, 1, 1, s]`` of padding, of which a pair is of queries and of keys. Padding may lie anywhere on the host, and behind the
    tokens on a GPU. ``window_size``: the keys that a query sees before and behind its place; places, as of ALiBi, are counted among the tokens that
    are no padding. ``core_attention_bias``: of the scores, with 1 where it is the same along a dimension; nothing reads one without its type.
    ``attention_dropout`` acts while training. ``softmax_type="learnable"`` has a parameter ``softmax_offset [h]``.

    With ``inference_params`` (``InferenceParams``) new tokens attend to all that its cache has of their sequences; the mask's kind has padding, and a
    causal one is aligned to the last token.

    ``NotServedError``: a ``softcap``, score functions, context parallelism, ``return_max_logit``, policies per sequence, attention in 8 bits
    (``fp8_dpa``, ``fp8_mha`` of a recipe), and beside ``inference_params`` biases other than ``"alibi"`` without slopes of one's own.
    ``checkpoint_core_attention``, ``fast_zero_fill``, ``num_splits`` and ``bf16_backward`` change no result.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Sequence[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        refuse("DotProductAttention", "leave it out", return_max_logit=return_max_logit)
        _check(attention_type, ("self", "cross"), "attention_type")
        _check(softmax_type, SOFTMAXES, "softmax_type")
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if self.num_gqa_groups < 1 or num_attention_heads % self.num_gqa_groups:
            of = "num_gqa_groups of DotProductAttention"
            raise ArgumentError(expected(f"a divisor of the {num_attention_heads} heads", of=of, got=num_gqa_groups, do="choose another number"))
        sharding = Sharding.of(tp_group, tp_size, sequence_parallel, type(self).__name__)
        self.name, self.layer_number, self.attention_type = layer_name(name), 1 if layer_number is None else layer_number, attention_type
        self.num_attention_heads, self.tp_size, self.tp_group = num_attention_heads, sharding.size, sharding.group
        self.num_attention_heads_per_partition = num_attention_heads // sharding.size
        self.num_gqa_groups_per_partition = self.num_gqa_groups // sharding.size
        widths = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        for width in widths:
            check_number(width, "kv_channels of DotProductAttention", least=1)
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = widths
        self.qkv_format, self.attn_mask_type = qkv_format, _mask(attn_mask_type)
        self.window_size, self.bottom_right_diagonal = window_of(self.attn_mask_type, window_size), bottom_right_diagonal
        self.softcap, self.softmax_type = softcap, softmax_type
        self.softmax_scale = widths[0] ** -0.5 if softmax_scale is None else softmax_scale
        self.attention_dropout = attention_dropout
        forks = get_rng_state_tracker is not None and not sequence_parallel and attention_dropout > 0
        self._dropout_context: Callable[[], Any] = get_rng_state_tracker().fork if forks and get_rng_state_tracker is not None else nullcontext
        offset = torch.zeros(self.num_attention_heads_per_partition, dtype=torch.float32, device=device_of("cuda"))
        self.softmax_offset = {"vanilla": None, "off-by-one": offset, "learnable": nn.Parameter(offset)}[softmax_type]
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """The processes that share out the heads: nothing passes between them here."""
        self.tp_group = tp_group

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p", load_balancing_strategy: Any = None
    ) -> None:
        """Refused (``NotServedError``), but for None."""
        refuse("DotProductAttention", "install NVIDIA's Python package, which runs on Fusible and has it", cp_group=cp_group)

    def forward(
        self,
        query_layer: torch.Tensor | None = None,
        key_layer: torch.Tensor | None = None,
        value_layer: torch.Tensor | None = None,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        score_mod_tensors: dict[str, torch.Tensor] | None = None,
        score_mod_bprop_tensors: dict[str, torch.Tensor] | None = None,
        qkv_layer: torch.Tensor | None = None,
        kv_layer: torch.Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: list[dict[str, Any]] | None = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> torch.Tensor:
        """The attention of a batch. ``qkv_layer``, or ``kv_layer`` beside ``query_layer``: q, k and v as one tensor, interleaved along
        ``qkv_interleave_dim``. ``cu_seqlens_...``: int32 ``[b + 1]``, wanted for ``"thd"``."""
        capped = self.softcap if softcap is None else softcap
        refuse("DotProductAttention", _ELSEWHERE, softcap=capped, score_mod=score_mod, thd_attention_policies=thd_attention_policies)
        _refuse_fp8()
        for name, x in {"query_layer": query_layer, "key_layer": key_layer, "value_layer": value_layer}.items():
            if x is not None:
                check_dense(x, f"{name} of DotProductAttention")
        q, k, v = (activation_of(x) for x in _unpacked(query_layer, key_layer, value_layer, qkv_layer, kv_layer, qkv_interleave_dim))
        format_ = self.qkv_format if qkv_format is None else qkv_format
        self._check_shapes(q, k, v, format_)
        _check(core_attention_bias_type, BIASES, "core_attention_bias_type")
        mask = self.attn_mask_type if attn_mask_type is None else _mask(attn_mask_type)
        cached = inference_params is not None
        if cached:
            mask = _mask_of_cache(mask, core_attention_bias if alibi_slopes is None else alibi_slopes)
        window = window_of(mask, self.window_size if window_size is None else window_size)
        bottom_right = _bottom_right(mask, self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal)
        cu_lengths = Lengths(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        if cached:
            k, v, lengths, longest = stepped(inference_params, self.layer_number, q, k, v, format_)
            order = None
        else:
            lengths, longest, order = lengths_of(cu_lengths, (max_seqlen_q, max_seqlen_kv), q, k, format_, mask, attention_mask)
        scores = (lengths.q.shape[0] - 1 if format_ == "thd" else q.shape[format_.index("b")], q.shape[-2], *longest)
        own_lengths = lengths if "padding" in mask else None
        bias_type, bias = bias_of(core_attention_bias_type, core_attention_bias, alibi_slopes, q, scores, own_lengths, bottom_right)
        if mask == "arbitrary":
            bias_type, bias = mask_bias(attention_mask, bias_type, bias, q.dtype, scores)
        if order is not None:
            q, k, v = order.ordered(q, k, v, format_)
            bias = order.ordered_bias(bias) if bias is not None and alibi_slopes is None else bias
        dropout = self.attention_dropout if self.training else 0.0
        call = Attention(format_, mask, window, bottom_right, bias_type, self.softmax_type, self.softmax_scale, dropout, *longest, cached)
        offset = self._offset(q.device)
        with self._dropout_context() if dropout else nullcontext():
            o = attend(call, q, k, v, bias, offset, lengths)
        if order is not None:
            o = order.restored(o, format_)
        return o.reshape(*o.shape[:-2], -1)

    def _offset(self, device: torch.device) -> torch.Tensor | None:
        """What the softmax adds to its sum, as a score of each head, fp32 ``[1, heads, 1, 1]``."""
        if self.softmax_offset is None:
            return None
        if self.softmax_type == "off-by-one":  # zeros, wherever the module was made: no ``to`` moves them and no ``to_empty`` fills them
            return torch.zeros(1, self.num_attention_heads_per_partition, 1, 1, dtype=torch.float32, device=device)
        return self.softmax_offset.reshape(1, -1, 1, 1).float()

    def _check_shapes(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, format_: str) -> None:
        _check(format_, FORMATS, "qkv_format")
        for name, x, width in zip(("query_layer", "key_layer", "value_layer"), (q, k, v), self._widths, strict=True):
            if x.ndim != len(format_) or x.shape[-1] != width:
                what = f"[{', '.join(format_[:-1])}, {width}]"
                raise ShapeError(expected(what, of=f"{name} of DotProductAttention", got=list(x.shape), do="reshape it, or name another qkv_format"))
        groups = self.num_gqa_groups_per_partition
        counts = {"query_layer": self.num_attention_heads_per_partition, "key_layer": groups, "value_layer": groups}
        for (name, heads), x in zip(counts.items(), (q, k, v), strict=True):
            if x.shape[-2] != heads:
                do = f"give as many as {'num_attention_heads' if name == 'query_layer' else 'num_gqa_groups'} says"
                raise ShapeError(expected(f"{heads} heads", of=f"{name} of DotProductAttention", got=x.shape[-2], do=do))
        if k.shape[:-1] != v.shape[:-1]:
            of, do = "value_layer of DotProductAttention", "give a value for each key"
            raise ShapeError(expected(f"the tokens of key_layer, {list(k.shape[:-2])}", of=of, got=list(v.shape[:-2]), do=do))
        if format_ != "thd" and q.shape[format_.index("b")] != k.shape[format_.index("b")]:
            of, got = "key_layer of DotProductAttention", k.shape[format_.index("b")]
            wanted = f"the {q.shape[format_.index('b')]} sequences of query_layer"
            raise ShapeError(expected(wanted, of=of, got=got, do="give the keys of each"))

    @property
    def _widths(self) -> tuple[int, int, int]:
        return self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v

    def extra_repr(self) -> str:
        return f"heads={self.num_attention_heads}, groups={self.num_gqa_groups}, mask={self.attn_mask_type}"


check_constructor(DotProductAttention)
check_forward(DotProductAttention)

_ELSEWHERE = "leave it out, or install NVIDIA's Python package, which runs on Fusible and has it"


def _check(value: Any, known: Collection[str], name: str) -> None:
    if value not in known:
        raise ArgumentError(expected(f"one of {', '.join(known)}", of=f"{name} of DotProductAttention", got=repr(value), do="name one of these"))


def _mask(name: str) -> str:
    name = {"padding,causal": "padding_causal", "causal,padding": "padding_causal", "causal_padding": "padding_causal"}.get(name, name)
    _check(name, MASKS, "attn_mask_type")
    return name


def _bottom_right(mask: str, asked: bool | None) -> bool:
    """Whether the diagonal of masks, windows and slopes is aligned to the bottom right corner of the scores."""
    if mask in ("causal", "padding_causal"):
        return False
    return asked is None or "bottom_right" in mask or asked


def _mask_of_cache(mask: str, bias: torch.Tensor | None) -> str:
    """The mask's kind between new tokens and those of a cache: a causal one is aligned to the last token of each sequence."""
    if bias is not None:
        of, do = "the biases of DotProductAttention with inference_params", "leave them out, or attend to the whole sequence"
        raise NotServedError(expected("none, or 'alibi' without slopes", of=of, got=f"a tensor {list(bias.shape)}", do=do))
    if "padding" not in mask:
        of, do = "attn_mask_type of DotProductAttention with inference_params", "pass 'padding_causal': sequences have lengths of their own"
        raise ArgumentError(expected("a kind with padding", of=of, got=repr(mask), do=do))
    return "padding_causal_bottom_right" if mask == "padding_causal" else mask


def _refuse_fp8() -> None:
    recipe = current_autocast().recipe
    asked = [name for name in ("fp8_dpa", "fp8_mha") if getattr(recipe, name, False)]
    if asked:
        raise NotServedError(expected(f"{asked[0]}=False", of="the recipe of DotProductAttention", got=True, do=_ELSEWHERE))


def _unpacked(
    q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, qkv: torch.Tensor | None, kv: torch.Tensor | None, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v, of which some came as one tensor."""
    if qkv is not None:
        operands = (*qkv.unbind(dim), q, k, v, kv)
    elif kv is not None:
        operands = (q, *kv.unbind(dim), k, v)
    else:
        operands = (q, k, v)
    if any(x is None for x in operands[:3]) or any(x is not None for x in operands[3:]):
        do = "give query_layer, key_layer and value_layer, or query_layer and kv_layer, or qkv_layer"
        raise ArgumentError(expected("q, k and v, each once", of="a call of DotProductAttention", got="another choice", do=do))
    return operands[:3]  # type: ignore[return-value]  # pyright: ignore[reportReturnType]
