"""ViT: patches of a picture, LayerNorm before each half of a layer, attention both ways."""

from __future__ import annotations

from torch import nn

from fusible import pytorch
from fusible.models.blueprints import EncoderBlueprint
from fusible.models.families.config import Config
from fusible.models.families.gpt2 import ACTIVATIONS
from fusible.models.families.registry import family
from fusible.models.parts import Activation, Attention, Norm, Part, Product, Residual
from fusible.models.patches import Patches

__all__ = ["vit"]


@family("vit")
def vit(config: Config) -> EncoderBlueprint:
    """Dosovitskiy et al. 2020, arXiv:2010.11929."""
    kind = config.architecture("ViTModel", "ViTForImageClassification")
    prefix, hidden = "" if kind == "ViTModel" else "vit.", config.size("hidden_size")
    projection, first, places = (f"{prefix}embeddings.{name}" for name in ("patch_embeddings.projection", "cls_token", "position_embeddings"))
    image, patch = config.pair("image_size", 224), config.pair("patch_size", 16)
    if any(size % part for size, part in zip(image, patch, strict=True)):
        raise config.refuse("patch_size", f"divisors of image_size, {image}")
    inputs = Patches(projection, first, places, hidden, config.size("num_channels", 3), image, patch)
    body = [part for layer in range(config.size("num_hidden_layers")) for part in _layer(config, f"{prefix}encoder.layer.{layer}")]
    body.append(Norm(f"{prefix}layernorm", hidden, config.number("layer_norm_eps", 1e-12), pytorch.LayerNorm))
    if kind == "ViTForImageClassification":
        classifier = Product(("classifier",), (config.labels,), hidden, bias=True, high_precision=True)
        return EncoderBlueprint(inputs, tuple(body), (classifier,), of_first=True)
    config.require(pooler_act="tanh")
    dense = Product(("pooler.dense",), (config.size("pooler_output_size", hidden),), hidden, bias=True, high_precision=True)
    return EncoderBlueprint(inputs, tuple(body), pooler=(dense, Activation(nn.Tanh)))


def _layer(config: Config, name: str) -> list[Part]:
    hidden, heads, inner = config.size("hidden_size"), config.size("num_attention_heads"), config.size("intermediate_size")
    eps, bias = config.number("layer_norm_eps", 1e-12), config.flag("qkv_bias", True)
    own = f"{name}.attention.attention"
    qkv = Product((f"{own}.query", f"{own}.key", f"{own}.value"), (hidden,) * 3, hidden, bias)
    attention = qkv, Attention(heads, heads, hidden // heads, {"causal": False})
    out = Product((f"{name}.attention.output.dense",), (hidden,), hidden, bias=True)
    up = Product((f"{name}.intermediate.dense",), (inner,), hidden, bias=True)
    act = Activation(config.choice("hidden_act", ACTIVATIONS, "gelu"))
    down = Product((f"{name}.output.dense",), (hidden,), inner, bias=True)
    before, after = (Norm(f"{name}.layernorm_{place}", hidden, eps, pytorch.LayerNorm) for place in ("before", "after"))
    return [Residual((before, *attention, out)), Residual((after, up, act, down))]
