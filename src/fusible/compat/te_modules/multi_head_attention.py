"""``MultiheadAttention``: projections to q, k and v, attention, and the projection of what it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fusible.compat.te_modules.attention import DotProductAttention
from fusible.compat.te_modules.fast_setattr import FastSetattr
from fusible.compat.te_modules.inference import InferenceParams
from fusible.compat.te_modules.linear import LayerNormLinear, Linear
from fusible.compat.te_modules.normalization import qk_norm
from fusible.compat.te_modules.parallel import OVERLAP, Sharding, handed_on, layer_name, part_name
from fusible.compat.te_modules.rope import apply_rotary_pos_emb
from fusible.errors import ArgumentError, NotServedError, expected
from fusible.pytorch.ops.basic.parallel import share
from fusible.tex.calls.constructors import check_constructor, check_forward

__all__ = ["MultiheadAttention"]

_OF_A_CALL = ("attn_mask_type", "window_size", "bottom_right_diagonal", "softcap")
"""Options of the module that the attention inside is told at each call: a call may have others."""


class MultiheadAttention(FastSetattr, nn.Module):
    """``proj(attention(q, k, v))``. Self-attention takes q, k and v from one ``qkv`` (``layernorm_qkv`` with ``input_layernorm``), cross-attention q
    from ``query_layer`` (``layernorm_query``), k and v from ``key_value`` of ``encoder_output``.

    ``fuse_qkv_params``: one parameter ``weight`` for q, k and v, and not ``query_weight``, ``key_weight``, ``value_weight``; with
    ``qkv_weight_interleaved`` its rows are group by group. ``qk_norm_type``: ``"L2Normalization"``, ``"RMSNorm"`` or ``"LayerNorm"`` of each head
    of q and k, after rotation or before it. ``set_parallel_mode``: heads are shared out among the processes. Other options are those of
    ``Linear`` and ``DotProductAttention``.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str = "cuda",
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        arguments = dict(locals())
        super().__init__()
        if attention_type not in ("self", "cross"):
            raise ArgumentError(expected("'self' or 'cross'", of="attention_type of MultiheadAttention", got=repr(attention_type), do="name one"))
        sharding = Sharding.of(tp_group, tp_size, sequence_parallel, type(self).__name__)
        width = kv_channels or hidden_size // num_attention_heads
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.qkv_format, self.attn_mask_type, self.window_size, self.softcap = qkv_format, attn_mask_type, window_size, softcap
        self.bottom_right_diagonal, self.layer_number = bottom_right_diagonal, layer_number or 1
        self.input_layernorm, self.attention_type = input_layernorm, attention_type
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        self.tp_group, self.tp_size, self.name = sharding.group, sharding.size, layer_name(name)
        self.qkv_weight_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.rotary_pos_interleaved, self.qk_norm_before_rope = rotary_pos_interleaved, qk_norm_before_rope
        self.num_attention_heads, self.num_gqa_groups, self.hidden_size_per_attention_head = num_attention_heads, groups, width
        self.num_attention_heads_per_partition = share(num_attention_heads, sharding.size, "MultiheadAttention's heads")
        self.num_gqa_groups_per_partition = share(groups, sharding.size, "MultiheadAttention's num_gqa_groups")
        self.hidden_size_q, self.hidden_size_kv = width * num_attention_heads, width * groups
        self.q_norm, self.k_norm = qk_norm(qk_norm_type, width, qk_norm_eps, params_dtype, device)
        own = "init_method", "return_bias", "name"  # of each layer inside
        common = handed_on(arguments, Linear, *own, *OVERLAP)
        inward = {**common, "init_method": init_method, "parallel_mode": "column" if set_parallel_mode else None}
        normalized = handed_on(arguments, LayerNormLinear, *own, "ub_overlap_rs") | {"eps": layernorm_epsilon, "ub_name": "qkv"}
        self._add_projections(name, hidden_size, inward, {**normalized, **inward}, fuse_qkv_params)
        options = handed_on(arguments, DotProductAttention, *_OF_A_CALL)
        options |= {"kv_channels": width, "num_gqa_groups": groups, "layer_number": self.layer_number, "name": part_name(name, "core_attention")}
        self.core_attention = DotProductAttention(**options)
        outward = {**common, "init_method": output_layer_init_method, "parallel_mode": "row" if set_parallel_mode else None}
        overlap = {"ub_overlap_rs": ub_overlap_rs, "ub_overlap_ag": ub_overlap_ag, "ub_name": "proj"}
        self.proj = Linear(self.hidden_size_q, hidden_size, return_bias=return_bias, name=part_name(name, "proj"), **outward, **overlap)

    def _add_projections(self, name: str | None, hidden_size: int, inward: dict[str, Any], normalized: dict[str, Any], fused: bool) -> None:
        """Add the layers that project to q, k and v. ``name``: what this one was given; ``inward``: the options of a ``Linear``;
        ``normalized``: those of a ``LayerNormLinear``."""
        q, kv = self.hidden_size_q, self.hidden_size_kv
        if self.attention_type == "self":
            parts = None if fused else {"query": q, "key": kv, "value": kv}
            if self.input_layernorm:
                own = part_name(name, "layernorm_linear_qkv")
                self.layernorm_qkv = LayerNormLinear(hidden_size, q + 2 * kv, parameters_split=parts, name=own, **normalized)
            else:
                self.qkv = Linear(hidden_size, q + 2 * kv, parameters_split=parts, name=part_name(name, "linear_qkv"), **inward)
            return
        if self.input_layernorm:
            split, own = None if fused else ("query",), part_name(name, "layernorm_linear_q")
            self.layernorm_query = LayerNormLinear(hidden_size, q, parameters_split=split, name=own, **normalized)
        else:
            self.query_layer = Linear(hidden_size, q, **inward)
        split = None if fused else ("key", "value")
        self.key_value = Linear(hidden_size, 2 * kv, parameters_split=split, name=part_name(name, "linear_kv"), **inward)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """The processes that share out the heads; the layers inside are told by theirs."""
        self.tp_group = tp_group

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p", load_balancing_strategy: Any = None
    ) -> None:
        """As of ``DotProductAttention``."""
        self.core_attention.set_context_parallel_group(cp_group)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
        thd_attention_policies: list[dict[str, Any]] | None = None,
        thd_attention_policy_dispatch: str = "auto",
        softcap: float | None = None,
    ) -> Any:
        """``hidden_states [s, b, hidden]``, ``[b, s, hidden]`` or ``[t, hidden]`` by ``qkv_format``, and the output like it; then ``proj``'s bias
        where ``return_bias``, and the normalized input where ``return_layernorm_output``. ``rotary_pos_emb``: angles, of q and k apart where two;
        with ``inference_params`` those of all positions, of which each sequence takes its own."""
        options = handed_on(locals(), DotProductAttention.forward)  # first of all: ``locals()`` is the arguments alone
        options |= {name: getattr(self, name) for name in _OF_A_CALL if options[name] is None}
        starts = self._begin_step(inference_params, hidden_states)
        q, k, v, *normalized = self._project(hidden_states, encoder_output, is_first_microbatch)
        if self.qk_norm_before_rope:
            q, k = self._normalize(q, k)
        if rotary_pos_emb is not None:
            both = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            padded = pad_between_seqs and cu_seqlens_q_padded is not None
            ends = (cu_seqlens_q_padded, cu_seqlens_kv_padded) if padded else (cu_seqlens_q, cu_seqlens_kv)
            if inference_params is not None:
                ends = (inference_params.cu_seqlens_q,) * 2
            rotation: dict[str, Any] = {"interleaved": self.rotary_pos_interleaved, "fused": True, "start_positions": starts}
            q, k = (apply_rotary_pos_emb(x, e, self.qkv_format, cu_seqlens=c, **rotation) for x, e, c in zip((q, k), both, ends, strict=True))
        if not self.qk_norm_before_rope:
            q, k = self._normalize(q, k)
        context = self.core_attention(q, k, v, qkv_format=self.qkv_format, **options)
        projected = self.proj(context, is_first_microbatch=is_first_microbatch)
        outputs = [*_tuple(projected), *normalized]
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def _begin_step(self, inference_params: InferenceParams | None, x: torch.Tensor) -> torch.Tensor | None:
        """Make sure that this layer has memory in the cache, and return the position of the first new token of each sequence; None without a
        cache."""
        if inference_params is None:
            return None
        if self.attention_type != "self":
            do = "leave it out: what is attended to does not grow"
            raise NotServedError(expected("inference_params=None", of="MultiheadAttention('cross')", got="a cache", do=do))
        if self.layer_number not in inference_params.cache_manager.cache:
            inference_params.allocate_memory(self.layer_number)
        starts = inference_params.get_seqlens_pre_step()
        return starts if self.qkv_format == "thd" else starts[: x.shape[self.qkv_format.index("b")]]

    def _project(self, x: torch.Tensor, encoder_output: torch.Tensor | None, first: bool | None) -> list[torch.Tensor]:
        """``[q, k, v]``, each ``[..., heads, width]``; then the normalized input where ``return_layernorm_output``. ``first``: whether it
        is the first microbatch."""
        groups, width = self.num_gqa_groups_per_partition, self.hidden_size_per_attention_head
        if self.attention_type == "self":
            mixed, *more = _tuple(self.layernorm_qkv(x, first) if self.input_layernorm else self.qkv(x, first))
            each = (self.num_attention_heads_per_partition // groups, 1, 1)
            return [*self._split(mixed, each), *more]
        if encoder_output is None:
            do = "give what the keys and values are made of"
            raise ArgumentError(expected("encoder_output", of="a call of MultiheadAttention('cross')", got="none", do=do))
        mixed = self.key_value(encoder_output, first)
        query, *more = _tuple(self.layernorm_query(x, first) if self.input_layernorm else self.query_layer(x, first))
        return [query.view(*query.shape[:-1], -1, width), *self._split(mixed, (1, 1)), *more]

    def _split(self, mixed: torch.Tensor, each: tuple[int, ...]) -> list[torch.Tensor]:
        """Split a joint projection into its parts, ``[..., heads, width]`` each. ``each``: the heads that a part has in every group."""
        groups, width = self.num_gqa_groups_per_partition, self.hidden_size_per_attention_head
        dims, at = ((groups, sum(each)), -2) if self.qkv_weight_interleaved else ((sum(each), groups), -3)
        parts = mixed.view(*mixed.shape[:-1], *dims, width).split(each, dim=at)
        return [part.reshape(*mixed.shape[:-1], -1, width) for part in parts]

    def _normalize(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))


check_constructor(MultiheadAttention)
check_forward(MultiheadAttention)


def _tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
