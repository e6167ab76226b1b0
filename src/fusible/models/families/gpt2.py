"""GPT-2: learned positions, LayerNorm, weights stored as ``[inputs, outputs]``."""

from __future__ import annotations

from fusible import pytorch
from fusible.models.families.config import Config
from fusible.models.families.registry import family
from fusible.models.parts import Activation, Attention, Blueprint, Norm, Part, Product, Residual

__all__ = ["ACTIVATIONS", "gpt2"]

ACTIVATIONS = {
    "gelu": pytorch.ErfGELU,
    "gelu_new": pytorch.GELU,
    "gelu_pytorch_tanh": pytorch.GELU,
    "relu": pytorch.ReLU,
    "silu": pytorch.SiLU,
}
"""Activations by the names that configurations have for them."""


@family("gpt2", attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1)
def gpt2(config: Config) -> Blueprint:
    """Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"."""
    config = config.with_names(hidden_size="n_embd", num_attention_heads="n_head", num_hidden_layers="n_layer", max_position_embeddings="n_positions")
    config.require(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    hidden, heads = config.size("n_embd"), config.size("n_head")
    inner, eps = config.size("n_inner", 4 * hidden), config.number("layer_norm_epsilon", 1e-5)
    name_of = config.text("activation_function", "gelu_new")
    if name_of not in ACTIVATIONS:
        raise config.refuse("activation_function", f"one of {', '.join(ACTIVATIONS)}")

    def norm(name: str) -> Norm:
        return Norm(name, hidden, eps, pytorch.LayerNorm)

    def product(name: str, rows: int, columns: int) -> Product:
        return Product((name,), (rows,), columns, bias=True, transposed=True)

    blocks = list[Part]()
    for layer in range(config.size("n_layer")):
        name = f"transformer.h.{layer}"
        attention = product(f"{name}.attn.c_attn", 3 * hidden, hidden), Attention(heads, heads, hidden // heads)
        mlp = product(f"{name}.mlp.c_fc", inner, hidden), Activation(ACTIVATIONS[name_of]), product(f"{name}.mlp.c_proj", hidden, inner)
        blocks.append(Residual((norm(f"{name}.ln_1"), *attention, product(f"{name}.attn.c_proj", hidden, hidden))))
        blocks.append(Residual((norm(f"{name}.ln_2"), *mlp)))
    vocabulary = config.size("vocab_size")
    head = Product(("lm_head",), (vocabulary,), hidden, high_precision=True)
    body = (*blocks, norm("transformer.ln_f"))
    tied, context = config.flag("tie_word_embeddings", True), config.size("n_positions")
    return Blueprint(vocabulary, context, hidden, "transformer.wte.weight", body, head, tied, positions="transformer.wpe.weight")
