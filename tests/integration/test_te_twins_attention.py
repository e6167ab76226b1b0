"""Attention, transformer layers and grouped layers by NVIDIA's names against NVIDIA's own on the same weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from te_client import package, relative_error
from te_twins import RECIPES, Twin, compare, twins

from fusible.compat import te_modules
from fusible.errors import ArgumentError, NotServedError, ShapeError

HIDDEN, HEADS, SEQUENCE, BATCH = 128, 4, 32, 2
SHAPE = (SEQUENCE, BATCH, HIDDEN)
NO_DROPOUT: dict[str, Any] = {"attention_dropout": 0.0}
LAYER: dict[str, Any] = {**NO_DROPOUT, "hidden_dropout": 0.0}


def attention(*options: Any, products: int = 4, call: Any = lambda module, x: module(x), **more: Any) -> Twin:
    return Twin("MultiheadAttention", (HIDDEN, HEADS, *options), {**NO_DROPOUT, **more}, products, SHAPE, call)


def layer(call: Any = lambda module, x: module(x), products: int = 6, **more: Any) -> Twin:
    return Twin("TransformerLayer", (HIDDEN, 256, HEADS), {**LAYER, **more}, products, SHAPE, call)


def _angles() -> torch.Tensor:
    return te_modules.RotaryPositionEmbedding(HIDDEN // HEADS)(SEQUENCE)


ENCODER = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(9))
PADDING = torch.arange(SEQUENCE).expand(BATCH, 1, 1, SEQUENCE) >= torch.tensor([SEQUENCE, 20]).view(BATCH, 1, 1, 1)
TWINS = {
    "MultiheadAttention": attention(),
    "MultiheadAttention with a normalization": attention(
        input_layernorm=True, num_gqa_groups=2, fuse_qkv_params=True, return_bias=True, return_layernorm_output=True
    ),
    "MultiheadAttention to another sequence": attention(
        attention_type="cross", attn_mask_type="no_mask", fuse_qkv_params=True, call=lambda module, x: module(x, encoder_output=ENCODER)
    ),
    "TransformerLayer": layer(),
    "TransformerLayer of Llama": layer(
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        num_gqa_groups=2,
        fuse_qkv_params=True,
        call=lambda module, x: module(x, rotary_pos_emb=_angles()),
    ),
}
QUANTIZED = ("TransformerLayer", "TransformerLayer of Llama")
PLAIN = {
    "queries and keys normalized": attention(qk_norm_type="RMSNorm", call=lambda module, x: module(x, rotary_pos_emb=_angles())),
    "queries and keys normalized to length 1": attention(qk_norm_type="L2Normalization", qk_norm_before_rope=True),
    "a window": attention(window_size=(8, 0)),
    "a learnable sink": attention(softmax_type="learnable", params_dtype=torch.bfloat16),
    "batch first": Twin("MultiheadAttention", (HIDDEN, HEADS), {**NO_DROPOUT, "qkv_format": "bshd"}, 4, (BATCH, SEQUENCE, HIDDEN)),
    "padding": attention(attn_mask_type="padding_causal", call=lambda module, x: module(x, PADDING)),
    "a mask of any kind": attention(
        attn_mask_type="arbitrary", call=lambda module, x: module(x, (torch.arange(SEQUENCE) % 3 == 1).expand(BATCH, 1, SEQUENCE, SEQUENCE))
    ),
    "a bias": attention(
        attn_mask_type="no_mask",
        call=lambda module, x: module(
            x,
            core_attention_bias_type="post_scale_bias",
            core_attention_bias=torch.linspace(-1, 1, SEQUENCE, dtype=torch.bfloat16).expand(1, HEADS, SEQUENCE, SEQUENCE).contiguous(),
        ),
    ),
    "slopes": attention(call=lambda module, x: module(x, core_attention_bias_type="alibi", alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625]))),
    "a decoder layer": layer(layer_type="decoder", call=lambda module, x: module(x, encoder_output=ENCODER), products=10),
    "residuals from behind the normalization": layer(apply_residual_connection_post_layernorm=True),
    "a last normalization": layer(output_layernorm=True, self_attn_mask_type="no_mask"),
    "attention beside the MLP": layer(parallel_attention_mlp=True, zero_centered_gamma=True),
}
GROUPED = Twin("GroupedLinear", (3, HIDDEN, 256), {}, 1, (64, HIDDEN), lambda module, x: module(x, [32, 0, 32]))


@pytest.fixture
def te() -> Iterator[Any]:
    with package() as te, warnings.catch_warnings():
        yield te


@pytest.mark.parametrize("name", TWINS)
def test_attention_computes_what_nvidias_does(te: Any, name: str) -> None:
    compare(te, TWINS[name], "bf16", passes=1)


@pytest.mark.parametrize("name", PLAIN)
def test_options_are_nvidias(te: Any, name: str) -> None:
    compare(te, PLAIN[name], "bf16", passes=1)


@pytest.mark.parametrize("recipe", RECIPES[1:])
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_layer_computes_what_nvidias_does(te: Any, name: str, recipe: str) -> None:
    compare(te, TWINS[name], recipe)


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "mxfp8"])
def test_a_grouped_layer_computes_what_nvidias_does(te: Any, recipe: str) -> None:
    compare(te, GROUPED, recipe)


def test_a_grouped_layer_writes_to_memory_that_it_is_given(te: Any) -> None:
    theirs, ours = twins(te, GROUPED)
    found = []
    for module in (theirs, ours):
        x = ENCODER.view(64, HIDDEN).clone().requires_grad_()
        out, dgrad = torch.full((64, 256), 7.0, dtype=x.dtype), torch.full((64, HIDDEN), 7.0, dtype=x.dtype)
        y = module(x, [32, 0, 32], out=out.detach(), dgrad_out=dgrad)
        y.float().sum().backward()
        assert y.data_ptr() == out.data_ptr() and x.grad is not None and torch.equal(x.grad, dgrad)
        found.append((out, dgrad))
    for one, other in zip(*found, strict=True):
        assert relative_error(other, one) <= 2.0**-8
    left = torch.full((64, 256), 7.0, dtype=torch.bfloat16)
    ours(torch.zeros(64, HIDDEN, dtype=torch.bfloat16), [32, 0, 16], out=left.detach())
    assert (left[48:] == 7).all() and not (left[:48] == 7).any()
    with pytest.raises(ShapeError, match="out of GroupedLinear: expected .*, got torch.float32"):
        ours(torch.zeros(64, HIDDEN, dtype=torch.bfloat16), [32, 0, 32], out=torch.empty(64, 256))


def test_sequences_one_after_another_are_apart(te: Any) -> None:
    twin = Twin("DotProductAttention", (HEADS, 32), {"qkv_format": "thd", "attn_mask_type": "padding_causal"}, 2)
    theirs, ours = (getattr(made_of, twin.name)(*twin.arguments, **twin.options) for made_of in (te, te_modules))
    ends = torch.tensor([0, 20, 28], dtype=torch.int32)
    q, k, v = (torch.randn(28, HEADS, 32, dtype=torch.bfloat16) for _ in range(3))
    wanted, found = (module(q, k, v, cu_seqlens_q=ends, cu_seqlens_kv=ends) for module in (theirs, ours))
    assert found.shape == wanted.shape and relative_error(found, wanted) <= 2.0**-7  # two roundings to bf16
    packed = te_modules.DotProductAttention(HEADS, 32)
    qkv = torch.randn(SEQUENCE, BATCH, 3, HEADS, 32)
    assert torch.equal(packed(qkv_layer=qkv), packed(*qkv.unbind(2)))


def test_a_checkpointed_layer_gives_the_gradients_of_a_whole_one(te: Any) -> None:
    module = twins(te, layer())[1]
    grads = []
    for checkpointed in (None, True, False):
        x = ENCODER.clone().requires_grad_()
        with te_modules_autocast():
            y = module(x) if checkpointed is None else te_modules.checkpoint(module, x, use_reentrant=checkpointed, self_attn_mask_type="causal")
        y.float().square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def te_modules_autocast() -> Any:
    from fusible import Float8CurrentScaling, autocast

    return autocast(recipe=Float8CurrentScaling())


@pytest.mark.parametrize(
    ("make", "kind", "sentence"),
    [
        (lambda: te_modules.DotProductAttention(4, 8, softcap=1.0)(*[torch.ones(2, 1, 4, 8)] * 3), NotServedError, "expected softcap=None"),
        (lambda: te_modules.DotProductAttention(4, 8)(*[torch.ones(2, 4, 8)] * 3), ShapeError, "expected [s, b, h, 8]"),
        (lambda: te_modules.DotProductAttention(4, 8, num_gqa_groups=3), ArgumentError, "expected a divisor"),
        (lambda: te_modules.DotProductAttention(4, 8, attn_mask_type="diagonal"), ArgumentError, "attn_mask_type of DotProductAttention"),
        (lambda: te_modules.DotProductAttention(4, 8)(torch.ones(2, 1, 4, 8)), ArgumentError, "q, k and v, each once,"),
        (lambda: te_modules.MultiheadAttention(8, 2, attention_type="cross")(torch.ones(2, 1, 8)), ArgumentError, "expected encoder_output"),
        (lambda: te_modules.TransformerLayer(8, 8, 2, parallel_attention_mlp=True, output_layernorm=True), ArgumentError, "expected neither"),
        (lambda: te_modules.TransformerLayer(8, 8, 2, fuse_wgrad_accumulation=True), ArgumentError, "one parameter for q, k and v"),
        (lambda: te_modules.GroupedLinear(2, 8, 8)(torch.ones(4, 8), [4]), ShapeError, "m_splits of GroupedLinear: expected [2], got [1]"),
    ],
)
def test_what_is_refused_is_one_sentence(make: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind) as raised:
        make()
    assert sentence in str(raised.value) and ": expected " in str(raised.value)
