"""``TransformerLayer``: attention and an MLP, each with what came before it added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fusible.compat.te_modules.fast_setattr import FastSetattr
from fusible.compat.te_modules.inference import InferenceParams
from fusible.compat.te_modules.layernorm_mlp import LayerNormMLP
from fusible.compat.te_modules.multi_head_attention import MultiheadAttention
from fusible.compat.te_modules.normalization import LayerNorm, RMSNorm
from fusible.compat.te_modules.parallel import OVERLAP, Sharding, handed_on, layer_name
from fusible.errors import ArgumentError, expected
from fusible.tex.calls.constructors import check_constructor, check_forward

__all__ = ["TransformerLayer"]

_OF_CROSS_ATTENTION = ("attn_mask_type", "window_size", "bottom_right_diagonal")
"""The arguments of an attention that the layer takes twice: for the attention to ``encoder_output`` they are named ``enc_dec_...``."""
_OF_A_CALL = ("self_attn_mask_type", "window_size", "bottom_right_diagonal", "softcap", *(f"enc_dec_{name}" for name in _OF_CROSS_ATTENTION))
"""Options of the layer that its attentions are told at each call: a call may have others."""


class DropPath(nn.Module):
    """A sample's whole branch is dropped with probability ``drop_prob``, the others' are scaled up (stochastic depth, arXiv:1603.09382)."""

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, hidden_state: torch.Tensor) -> torch.Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return hidden_state
        keep = 1 - self.drop_prob
        shape = (hidden_state.shape[0],) + (1,) * (hidden_state.ndim - 1)
        kept = (keep + torch.rand(shape, dtype=hidden_state.dtype, device=hidden_state.device)).floor_()
        return hidden_state.div(keep) * kept


class TransformerLayer(FastSetattr, nn.Module):
    """``h = x + self_attention(x)``, with ``layer_type="decoder"`` then ``h += inter_attention(h, encoder_output)``, and ``y = h + layernorm_mlp(h)``
    (Vaswani et al. 2017, arXiv:1706.03762). Dropout of probability ``hidden_dropout`` acts on each addend with its bias.

    The normalizations stand before attention and MLP; with ``output_layernorm`` a last one stands behind, and none before attention.
    ``apply_residual_connection_post_layernorm``: what is added is what the normalization gave. ``parallel_attention_mlp``: both branches take ``x``.
    ``drop_path_rate``: the probability of a sample's attention and MLP to be left out. Other options are those of ``MultiheadAttention`` and
    ``LayerNormMLP``; ``ub_...`` ask for overlap where ``ub_tp_comm_overlap``, of which there is none here (a warning says so, once).
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str = "cuda",
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        arguments = dict(locals())
        super().__init__()
        _check(layer_type, parallel_attention_mlp, apply_residual_connection_post_layernorm, output_layernorm)
        if fuse_wgrad_accumulation and not fuse_qkv_params:
            do = "pass fuse_qkv_params=True"
            raise ArgumentError(expected("one parameter for q, k and v", of="TransformerLayer with fuse_wgrad_accumulation", got="three", do=do))
        sharding = Sharding.of(tp_group, tp_size, sequence_parallel, type(self).__name__)
        self.self_attn_mask_type, self.window_size, self.bottom_right_diagonal = self_attn_mask_type, window_size, bottom_right_diagonal
        self.enc_dec_attn_mask_type, self.enc_dec_window_size = enc_dec_attn_mask_type, enc_dec_window_size
        self.enc_dec_bottom_right_diagonal, self.softcap = enc_dec_bottom_right_diagonal, softcap
        self.layer_number, self.layer_type, self.output_layernorm, self.name = layer_number, layer_type, output_layernorm, layer_name(name)
        self.apply_residual_connection_post_layernorm, self.parallel_attention_mlp = apply_residual_connection_post_layernorm, parallel_attention_mlp
        self.tp_size, self.sequence_parallel, self.seq_length = sharding.size, sharding.sequence, seq_length
        self.hidden_dropout = hidden_dropout
        arguments |= {name: ub_tp_comm_overlap and arguments[name] for name in OVERLAP}
        returned: dict[str, Any] = {"return_layernorm_output": apply_residual_connection_post_layernorm, "return_bias": not parallel_attention_mlp}
        attention = handed_on(arguments, MultiheadAttention, *_OF_A_CALL) | returned | {"qkv_format": attn_input_format}
        before: dict[str, Any] = {"input_layernorm": not output_layernorm, "name": f"{self.name}.self_attention"}
        self.self_attention = MultiheadAttention(**{**attention, **before})
        if layer_type == "decoder":
            cross: dict[str, Any] = {"attn_mask_type": enc_dec_attn_mask_type, "input_layernorm": True, "attention_type": "cross"}
            self.inter_attention = MultiheadAttention(**{**attention, **cross, "name": f"{self.name}.inter_attention"})
        mlp = handed_on(arguments, LayerNormMLP) | returned | {"eps": layernorm_epsilon, "name": f"{self.name}.layernorm_mlp"}
        self.layernorm_mlp = LayerNormMLP(**mlp)
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate > 0.0 else None
        if output_layernorm:
            made = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[normalization]
            options: dict[str, Any] = {"params_dtype": params_dtype, "zero_centered_gamma": zero_centered_gamma, "device": device}
            self.layernorm = made(hidden_size, eps=layernorm_epsilon, sequence_parallel=sharding.sequence, **options)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """The processes that share out all layers inside."""
        for module in list(self.modules())[1:]:
            if hasattr(module, "set_tensor_parallel_group"):
                module.set_tensor_parallel_group(tp_group)  # pyright: ignore[reportCallIssue]

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p", load_balancing_strategy: Any = None
    ) -> None:
        """As of ``DotProductAttention``."""
        self.self_attention.set_context_parallel_group(cp_group)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
    ) -> torch.Tensor:
        """The output, like ``hidden_states [s, b, hidden]`` (or as ``attn_input_format`` says). Arguments are ``MultiheadAttention``'s, those that
        begin with ``enc_dec_`` of the attention to ``encoder_output``."""
        arguments = dict(locals())  # first of all: that is the arguments alone
        arguments |= {name: getattr(self, name) for name in _OF_A_CALL if arguments[name] is None}
        x = hidden_states.contiguous()
        shared = handed_on(arguments, MultiheadAttention.forward, "hidden_states", "encoder_output")
        keys: dict[str, Any] = {"cu_seqlens_kv": cu_seqlens_q, "cu_seqlens_kv_padded": cu_seqlens_q_padded, "max_seqlen_kv": max_seqlen_q}
        outputs = self.self_attention(x, **{**shared, **keys, "attn_mask_type": arguments["self_attn_mask_type"]})
        if self.parallel_attention_mlp:
            mlp = self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch)
            return self._added(outputs, mlp, x, self.drop_path)
        hidden, bias, *normalized = outputs
        x = self._added(hidden, bias, normalized[0] if normalized else x, self.drop_path)
        if self.layer_type == "decoder":
            shared |= {name: arguments[f"enc_dec_{name}"] for name in _OF_CROSS_ATTENTION}
            shared |= {"attention_mask": enc_dec_attn_mask, "encoder_output": encoder_output}
            shared |= {"inference_params": None, "thd_attention_policies": None}  # the encoder's tokens do not grow; policies are the layer's own
            hidden, bias, *normalized = self.inter_attention(x, **shared)
            x = self._added(hidden, bias, normalized[0] if normalized else x, None)
        hidden, bias, *normalized = self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch)
        y = self._added(hidden, bias, normalized[0] if normalized else x, self.drop_path)
        return self.layernorm(y) if self.output_layernorm else y

    def _added(self, hidden: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, drop_path: DropPath | None) -> torch.Tensor:
        """``residual + dropout(hidden + bias)``, where a bias is there."""
        if bias is not None:
            hidden = hidden + bias
        hidden = nn.functional.dropout(hidden, self.hidden_dropout, self.training)
        return residual + (hidden if drop_path is None else drop_path(hidden))


check_constructor(TransformerLayer)
check_forward(TransformerLayer)


def _check(layer_type: str, parallel: bool, post_layernorm: bool, output_layernorm: bool) -> None:
    if layer_type not in ("encoder", "decoder"):
        raise ArgumentError(expected("'encoder' or 'decoder'", of="layer_type of TransformerLayer", got=repr(layer_type), do="name one of these"))
    others = {"layer_type='decoder'": layer_type == "decoder", "apply_residual_connection_post_layernorm": post_layernorm}
    wrong = [name for name, there in {**others, "output_layernorm": output_layernorm}.items() if there] if parallel else []
    if wrong:
        raise ArgumentError(expected("neither", of="TransformerLayer with parallel_attention_mlp", got=wrong[0], do="leave one of them out"))
