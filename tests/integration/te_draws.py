"""Options of NVIDIA's modules, drawn by a seed, as twins of one module of theirs and one of ours."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from te_twins import RECIPES, Twin

from fusible.compat import te_modules

__all__ = ["DRAWS", "drawn"]

HIDDEN, HEADS, SEQUENCE, BATCH, WIDTH = 128, 4, 32, 2, 32
ACTIVATIONS = ("gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu", "clamped_swiglu")
NORMS = ("LayerNorm", "RMSNorm")
Rng = random.Random


def _some(rng: Rng, **choices: Any) -> dict[str, Any]:
    """Each option of some, drawn from its values."""
    return {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.7}


_BOTH = (False, True)


def linear(rng: Rng) -> Twin:
    out = rng.choice((64, 192, 256))
    split = rng.choice((None, None, ("one", "other_"), {"query_": out // 2, "key_": out // 4, "value_": out // 4}))
    options = _some(rng, bias=_BOTH, return_bias=_BOTH, params_dtype=(torch.float32, torch.bfloat16), save_original_input=_BOTH)
    options["parameters_split"] = split
    return Twin("Linear", (HIDDEN, out), options, shape=_rows(rng))


def layernorm_linear(rng: Rng) -> Twin:
    norm = _some(rng, normalization=NORMS, zero_centered_gamma=_BOTH, return_layernorm_output=_BOTH, eps=(1e-3, 1e-6))
    options = {**linear(rng).options, **norm}
    options.pop("save_original_input", None)
    return Twin("LayerNormLinear", (HIDDEN, 192), _with_thirds(options), shape=_rows(rng))


def _with_thirds(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "parameters_split": ("a", "b", "c") if options.get("parameters_split") else None}


def layernorm_mlp(rng: Rng) -> Twin:
    activation = rng.choice(ACTIVATIONS)
    options = {
        **_some(rng, normalization=NORMS, zero_centered_gamma=_BOTH, return_layernorm_output=_BOTH, bias=_BOTH, return_bias=_BOTH, checkpoint=_BOTH),
        **_some(rng, params_dtype=(torch.float32, torch.bfloat16), eps=(1e-3, 1e-6)),
        "activation": activation,
    }
    if activation == "clamped_swiglu" and rng.random() < 0.5:
        options["activation_params"] = {"limit": rng.choice((1.0, 5.0)), "alpha": rng.choice((1.0, 1.702))}
    return Twin("LayerNormMLP", (HIDDEN, rng.choice((128, 256))), options, 2, _rows(rng))


def norm(rng: Rng) -> Twin:
    shape = rng.choice(((HIDDEN,), (4, WIDTH)))
    options = _some(rng, eps=(1e-3, 1e-6), zero_centered_gamma=_BOTH, sequence_parallel=(None, False, True))
    return Twin(rng.choice(NORMS), (shape,), options, 0, (*rng.choice(((6,), (3, 5))), *shape))


def grouped(rng: Rng) -> Twin:
    splits = rng.choice(([32, 0, 32], [64, 32, 96], [0, 0, 64]))
    options = _some(rng, bias=_BOTH, return_bias=_BOTH, params_dtype=(torch.float32, torch.bfloat16))

    def call(module: Any, x: Any) -> Any:
        y = module(x, splits)
        return (y[0], *y[1]) if isinstance(y, tuple) else y

    return Twin("GroupedLinear", (3, HIDDEN, 128), options, 1, (sum(splits), HIDDEN), call)


def rotary(rng: Rng) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    made = te_modules.RotaryPositionEmbedding(WIDTH, rng.choice((1.0, 0.5)), rotary_base=rng.choice((1e4, 5e5)))(SEQUENCE)
    return rng.choice((made, (made, made)))


def _attention_call(rng: Rng, options: dict[str, Any], layout: str) -> dict[str, Any]:
    """What a call of attention is given beside its tensor, to fit ``options``, to which the kind of mask is added."""
    given: dict[str, Any] = {}
    mask = rng.choice(("no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "arbitrary"))
    options[rng.choice(("self_attn_mask_type",)) if "hidden_dropout" in options else "attn_mask_type"] = mask
    if rng.random() < 0.4 and "padding" not in mask and mask != "arbitrary":
        options["window_size"] = rng.choice(((8, 0), (16, 0))) if "causal" in mask else rng.choice(((8, 8), (-1, -1)))
    if "padding" in mask:
        given["attention_mask"] = torch.arange(SEQUENCE).expand(BATCH, 1, 1, SEQUENCE) >= torch.tensor([SEQUENCE, 20]).view(BATCH, 1, 1, 1)
    if mask == "arbitrary":
        given["attention_mask"] = (torch.arange(SEQUENCE) % rng.choice((3, 5)) == 1).expand(BATCH, 1, SEQUENCE, SEQUENCE)
    if rng.random() < 0.5:
        given["rotary_pos_emb"] = rotary(rng)
    elif mask in ("no_mask", "causal") and "window_size" not in options and rng.random() < 0.4:
        bias = torch.linspace(-1, 1, SEQUENCE, dtype=torch.bfloat16).expand(1, HEADS, SEQUENCE, SEQUENCE).contiguous()
        given.update(core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    return given


def _shape(layout: str) -> tuple[int, ...]:
    return (SEQUENCE, BATCH, HIDDEN) if layout == "sbhd" else (BATCH, SEQUENCE, HIDDEN)


def _called(given: dict[str, Any]) -> Callable[..., Any]:
    return lambda module, x: module(x, **given)


def attention(rng: Rng) -> Twin:
    layout = rng.choice(("sbhd", "bshd"))
    options: dict[str, Any] = {
        "attention_dropout": 0.0,
        "qkv_format": layout,
        **_some(rng, num_gqa_groups=(1, 2, 4), fuse_qkv_params=_BOTH, qkv_weight_interleaved=_BOTH, bias=_BOTH, return_bias=_BOTH),
        **_some(rng, input_layernorm=_BOTH, normalization=NORMS, zero_centered_gamma=_BOTH, qk_norm_before_rope=_BOTH),
        **_some(rng, qk_norm_type=(None, "L2Normalization", "RMSNorm", "LayerNorm"), softmax_type=("vanilla", "off-by-one")),
        **_some(rng, rotary_pos_interleaved=_BOTH, return_layernorm_output=_BOTH),
    }
    if not options.get("input_layernorm"):
        options.pop("return_layernorm_output", None)
    given = _attention_call(rng, options, layout)
    if options.get("softmax_type") == "off-by-one":
        options.pop("window_size", None)
    return Twin("MultiheadAttention", (HIDDEN, HEADS), options, 4, _shape(layout), _called(given))


def cross(rng: Rng) -> Twin:
    layout = rng.choice(("sbhd", "bshd"))
    encoder = torch.randn(_shape(layout), dtype=torch.bfloat16, generator=torch.Generator().manual_seed(9))
    options = {
        "attention_dropout": 0.0,
        "qkv_format": layout,
        "attention_type": "cross",
        "attn_mask_type": "no_mask",
        **_some(rng, num_gqa_groups=(2, 4), fuse_qkv_params=_BOTH, bias=_BOTH, input_layernorm=_BOTH, normalization=NORMS),
    }
    return Twin("MultiheadAttention", (HIDDEN, HEADS), options, 4, _shape(layout), _called({"encoder_output": encoder}))


def layer(rng: Rng) -> Twin:
    layout = rng.choice(("sbhd", "bshd"))
    options: dict[str, Any] = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attn_input_format": layout,
        "activation": rng.choice(ACTIVATIONS),
        **_some(rng, num_gqa_groups=(1, 2, 4), fuse_qkv_params=_BOTH, bias=_BOTH, normalization=NORMS, zero_centered_gamma=_BOTH),
        **_some(rng, qk_norm_type=(None, "RMSNorm"), layer_type=("encoder", "encoder", "decoder")),
    }
    form = rng.choice(("plain", "output_layernorm", "apply_residual_connection_post_layernorm", "parallel_attention_mlp"))
    if form != "plain" and not (form == "parallel_attention_mlp" and options.get("layer_type") == "decoder"):
        options[form] = True
    given = _attention_call(rng, options, layout)
    if options.get("layer_type") == "decoder":
        given["encoder_output"] = torch.randn(_shape(layout), dtype=torch.bfloat16, generator=torch.Generator().manual_seed(9))
    return Twin("TransformerLayer", (HIDDEN, 256, HEADS), options, 10, _shape(layout), _called(given))


def _rows(rng: Rng) -> tuple[int, ...]:
    return rng.choice(((64, HIDDEN), (2, 32, HIDDEN), (32, HIDDEN)))


DRAWS: dict[str, Callable[[Rng], Twin]] = {
    draw.__name__: draw for draw in (linear, layernorm_linear, layernorm_mlp, norm, grouped, attention, cross, layer)
}


def drawn(name: str, seed: int) -> tuple[Twin, str]:
    """A twin of a kind, and the recipe to call it under."""
    rng = Rng(f"{name} {seed}")
    twin, recipe = DRAWS[name](rng), rng.choice(RECIPES)
    if recipe == "delayed" and twin.options.get("save_original_input"):  # which NVIDIA's refuses
        recipe = "current"
    return twin, recipe
