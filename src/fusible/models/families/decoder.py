"""What the families after Llama share: names of layers, grouped-query attention with rotary positions, gated MLPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from fusible import pytorch
from fusible.models.families.config import Config
from fusible.models.families.rotary import rotary_options
from fusible.models.parts import Activation, Attention, Blueprint, HeadNorm, Norm, Part, Product, Residual

__all__ = ["Decoder", "GATES", "layer_types"]

GATES: dict[str, type[nn.Module]] = {
    "gelu": pytorch.ErfGeGLU,
    "gelu_new": pytorch.GeGLU,
    "gelu_pytorch_tanh": pytorch.GeGLU,
    "relu": pytorch.ReGLU,
    "silu": pytorch.SwiGLU,
    "swish": pytorch.SwiGLU,
}
"""The gate of an activation by the name that configurations have for it; ``gelu`` is the form with the error function."""


def layer_types(config: Config, slides: Callable[[int], bool]) -> list[str]:
    """The kind of each layer, for files that were written before configurations said it: whether a layer ``slides`` is a rule of its family."""
    return ["sliding_attention" if slides(layer) else "full_attention" for layer in range(config.size("num_hidden_layers"))]


@dataclass(frozen=True)
class Decoder:
    """The parts of a layer of Llama's kind; a family takes those that it has. ``zero_centered``: of all norms. ``windows``: which layers have one,
    where there is a ``sliding_window``: those that ``layer_types`` says do, in ``typed`` ones. ``partial``: whether heads may be rotated in part."""

    config: Config
    zero_centered: bool = False
    windows: Literal["none", "all", "typed"] = "none"
    partial: bool = False

    @property
    def hidden(self) -> int:
        return self.config.size("hidden_size")

    @property
    def layers(self) -> range:
        return range(self.config.size("num_hidden_layers"))

    @property
    def heads(self) -> int:
        return self.config.size("num_attention_heads")

    @property
    def groups(self) -> int:
        return self.config.size("num_key_value_heads", self.heads)

    @property
    def head_width(self) -> int:
        return self.config.size("head_dim", self.hidden // self.heads)

    @property
    def eps(self) -> float:
        return self.config.number("rms_norm_eps", 1e-6)

    def norm(self, name: str) -> Norm:
        return Norm(name, self.hidden, self.eps, zero_centered=self.zero_centered)

    def layer_type(self, layer: int) -> str | None:
        """``"full_attention"`` or ``"sliding_attention"``, where the configuration says it of each layer."""
        types = self.config.names("layer_types") if self.windows == "typed" else None
        if types is None:
            return None
        if layer >= len(types) or types[layer] not in ("full_attention", "sliding_attention"):
            raise self.config.refuse("layer_types", "full_attention or sliding_attention of each layer")
        return types[layer]

    def window(self, layer: int) -> tuple[int, int]:
        """How far back a token of a layer sees: ``sliding_window`` tokens, its own among them."""
        if self.windows == "none" or not self.config.has("sliding_window") or self.layer_type(layer) == "full_attention":
            return (-1, -1)
        return (self.config.size("sliding_window") - 1, 0)

    def qkv(self, name: str, *, bias: bool) -> Product:
        q, kv = self.heads * self.head_width, self.groups * self.head_width
        return Product((f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"), (q, kv, kv), self.hidden, bias)

    def head_norm(self, name: str) -> HeadNorm:
        width, eps = self.head_width, self.eps
        return HeadNorm(f"{name}.q_norm", f"{name}.k_norm", self.heads, self.groups, width, eps, zero_centered=self.zero_centered)

    def attention(self, layer: int, scale: float | None = None, **options: Any) -> Attention:
        """Rotary attention of a layer; ``scale`` in the place of the usual one, ``options`` beside those that the configuration tells of."""
        own = {"window_size": self.window(layer), **rotary_options(self.config, self.head_width, self.layer_type(layer), scale)}
        if "rope_width" in own and not self.partial:
            raise self.config.refuse("partial_rotary_factor", "1", own["rope_width"] / self.head_width)
        return Attention(self.heads, self.groups, self.head_width, {**own, **options})

    def out(self, name: str, *, bias: bool = False) -> Product:
        return Product((name,), (self.hidden,), self.heads * self.head_width, bias)

    def gate(self, entry: str = "hidden_act") -> type[nn.Module]:
        """The gate of the MLPs."""
        name = self.config.text(entry, "silu")
        if name not in GATES:
            raise self.config.refuse(entry, f"one of {', '.join(GATES)}")
        return GATES[name]

    def mlp(self, name: str, *, bias: bool = False, entry: str = "hidden_act") -> tuple[Part, ...]:
        """``down(act(gate(x)) * up(x))``."""
        inner = self.config.size("intermediate_size")
        up = Product((f"{name}.gate_proj", f"{name}.up_proj"), (inner, inner), self.hidden, bias)
        return up, Activation(self.gate(entry)), Product((f"{name}.down_proj",), (self.hidden,), inner, bias)

    def whole(self, blocks: list[Part], **options: Any) -> Blueprint:
        """The model of these blocks."""
        vocabulary = self.config.size("vocab_size")
        tied = self.config.flag("tie_word_embeddings", False)
        head = Product(("lm_head",), (vocabulary,), self.hidden, high_precision=True)
        body = (*blocks, self.norm("model.norm"))
        context = self.config.size("max_position_embeddings")
        return Blueprint(vocabulary, context, self.hidden, "model.embed_tokens.weight", body, head, tied, **options)

    def block(self, name: str, attention: tuple[Part, ...], mlp: tuple[Part, ...]) -> list[Part]:
        """Both halves of a pre-norm layer."""
        first, second = self.norm(f"{name}.input_layernorm"), self.norm(f"{name}.post_attention_layernorm")
        return [Residual((first, *attention)), Residual((second, *mlp))]
