"""BERT: learned positions and types of tokens, LayerNorm behind each half of a layer, attention both ways."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fusible import pytorch
from fusible.models.blueprints import EncoderBlueprint
from fusible.models.families.config import Config
from fusible.models.families.gpt2 import ACTIVATIONS
from fusible.models.families.registry import family
from fusible.models.parts import Activation, Attention, Norm, Part, Product, Residual
from fusible.models.tokens import Tokens

__all__ = ["bert"]

_ARCHITECTURES = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")
_OLDER = ((".LayerNorm.weight", ".LayerNorm.gamma"), (".LayerNorm.bias", ".LayerNorm.beta"))


@family("bert")
def bert(config: Config) -> EncoderBlueprint:
    """Devlin et al. 2018, arXiv:1810.04805."""
    kind = config.architecture(*_ARCHITECTURES)
    config.require(position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    prefix, hidden = "" if kind == "BertModel" else "bert.", config.size("hidden_size")
    vocabulary, eps, act = config.size("vocab_size"), config.number("layer_norm_eps", 1e-12), config.choice("hidden_act", ACTIVATIONS, "gelu")
    names = f"{prefix}embeddings.position_embeddings.weight", f"{prefix}embeddings.token_type_embeddings.weight"
    context, kinds = config.size("max_position_embeddings", 512), config.size("type_vocab_size", 2)
    tokens = Tokens(f"{prefix}embeddings.word_embeddings.weight", vocabulary, hidden, names[0], context, names[1], kinds)

    def norm(name: str) -> Norm:
        return Norm(name, hidden, eps, pytorch.LayerNorm)

    body: list[Part] = [norm(f"{prefix}embeddings.LayerNorm")]
    for layer in range(config.size("num_hidden_layers")):
        body += _layer(config, f"{prefix}encoder.layer.{layer}", norm, Activation(act))
    pooler = Product((f"{prefix}pooler.dense",), (hidden,), hidden, bias=True, high_precision=True), Activation(nn.Tanh)
    if kind == "BertModel":
        return EncoderBlueprint(tokens, tuple(body), pooler=pooler, older=_OLDER)
    if kind == "BertForSequenceClassification":
        classifier = Product(("classifier",), (config.labels,), hidden, bias=True, high_precision=True)
        return EncoderBlueprint(tokens, tuple(body), (*pooler, classifier), of_first=True, older=_OLDER)
    name, tied = "cls.predictions", config.flag("tie_word_embeddings", True)
    transform = Product((f"{name}.transform.dense",), (hidden,), hidden, bias=True, high_precision=True)
    decoder = Product((f"{name}.decoder",), (vocabulary,), hidden, (f"{name}.bias" if tied else f"{name}.decoder.bias",), high_precision=True)
    head = transform, Activation(act), norm(f"{name}.transform.LayerNorm"), decoder
    return EncoderBlueprint(tokens, tuple(body), head, tied=tied, older=_OLDER)


def _layer(config: Config, name: str, norm: Callable[[str], Norm], act: Activation) -> list[Part]:
    """Both halves of a layer, each with its norm behind it."""
    hidden, heads, inner = config.size("hidden_size"), config.size("num_attention_heads"), config.size("intermediate_size")
    own, out = f"{name}.attention.self", f"{name}.attention.output"
    qkv = Product((f"{own}.query", f"{own}.key", f"{own}.value"), (hidden,) * 3, hidden, bias=True)
    attention = Attention(heads, heads, hidden // heads, {"causal": False})
    first = Residual((qkv, attention, Product((f"{out}.dense",), (hidden,), hidden, bias=True)))
    up = Product((f"{name}.intermediate.dense",), (inner,), hidden, bias=True)
    second = Residual((up, act, Product((f"{name}.output.dense",), (hidden,), inner, bias=True)))
    return [first, norm(f"{out}.LayerNorm"), second, norm(f"{name}.output.LayerNorm")]
