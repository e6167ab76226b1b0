"""What a conversion is to do: of each module the swap, or why there is none. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fusible.models.convert.activation import activation_swap, find_activation, is_like_activation, is_one_kernel
from fusible.models.convert.attention import attention_swap
from fusible.models.convert.chains import find_chain, relay_swaps
from fusible.models.convert.encoders import LayerByLayer, called_in_parts
from fusible.models.convert.experts import experts_swap, is_like_experts, why_no_experts
from fusible.models.convert.linear import linear_swap, why_no_linear
from fusible.models.convert.mlp import find_mlp, mlp_swap
from fusible.models.convert.norm import find_norm, is_like_norm, norm_swap
from fusible.models.convert.projections import find_projections
from fusible.models.convert.relay import Relay
from fusible.models.convert.report import Layer, Outcome
from fusible.models.convert.scaled_products import TEXT, attention_configs, why_no_attention
from fusible.models.convert.selection import Filter, Selection, is_like_linear, kept_in_high_precision
from fusible.models.convert.stored_fp8 import is_stored_fp8, stored_fp8_swap, stored_fp8_text, why_no_stored_fp8
from fusible.models.convert.swapping import Swap, Swapped
from fusible.quantized import Recipe

__all__ = ["Planner"]

_STORED = "FP8 weight"


class Planner:
    """``swaps``: those to make; ``layers``: what is said of each module, by its name, in the model's order."""

    def __init__(self, model: nn.Module, recipe: Recipe | None, selection: Selection, keep: Sequence[Filter]) -> None:
        self._recipe, self._selection = recipe, selection
        self._kept = kept_in_high_precision(model, keep)
        self._converted: set[str] = set()
        self._activations: dict[str, str] = {}
        self.swaps: list[Swap] = []
        self.configs: list[Any] = []
        self.relays: list[Relay] = []
        found: dict[str, Layer] = {}
        modules = list(model.named_modules())
        for name, module in modules:
            self._look_at_layer(name, module, found)
        for name, module in modules:
            if name not in found and "forward" not in vars(module) and not selection.why_not(name, module):
                self._look_at_block(name, module, found)
        for name, module in modules:
            if isinstance(module, nn.ModuleList):
                for own, block in module.named_children():
                    self._look_at_chain(f"{name}.{own}", block, found)
        for name, module in modules:
            self._look_at_encoder(name, module)
        self.layers = (*self._attention(model), *(found[name] for name, _ in modules if name in found))

    def _look_at_layer(self, name: str, module: nn.Module, found: dict[str, Layer]) -> None:
        if isinstance(module, Swapped):
            why = self._selection.why_not(name, module)
            text = f"{module.original.__name__}, earlier" + (f"; {why}, so that it keeps its recipe" if why else "")
            found[name] = Layer(name, "layer", "converted", text)
            return
        kind = _kind(module)
        if not kind:
            return
        why = self._selection.why_not(name, module) or ("its forward is exchanged, as by a hook of accelerate" if "forward" in vars(module) else "")
        if why:
            found[name] = Layer(name, kind, "left", why)
        elif name in self._kept and kind == "linear":
            found[name] = Layer(name, kind, "kept", self._kept[name])
        else:
            by_kind = {"linear": self._linear, "norm": self._norm, "activation": self._activation, _STORED: self._stored}
            found[name] = Layer(name, kind, *by_kind[kind](name, module))

    def _linear(self, name: str, module: nn.Module) -> tuple[Outcome, str]:
        wrong = why_no_linear(module)
        return ("left", wrong) if wrong else self._swapped(name, linear_swap(module, self._recipe), _sizes(module))

    def _stored(self, name: str, module: nn.Module) -> tuple[Outcome, str]:
        """It is in 8 bits whatever is asked for, and is computed by itself: nothing that is adjacent can lie behind its weights."""
        wrong = why_no_stored_fp8(module)
        if wrong:
            return "left", wrong
        self.swaps.append(stored_fp8_swap(module, self._recipe))
        return "converted", stored_fp8_text(module)

    def _norm(self, name: str, module: nn.Module) -> tuple[Outcome, str]:
        norm = find_norm(module)
        text = f"{type(module).__name__} as {norm.text}"
        return ("left", norm.wrong) if norm.wrong else self._swapped(name, norm_swap(module, norm, self._recipe), text)

    def _activation(self, name: str, module: nn.Module) -> tuple[Outcome, str]:
        activation = find_activation(module)
        if not activation:
            return "left", f"{type(module).__name__} computes none of the activations of fusible.tex"
        self._activations[name] = activation
        if is_one_kernel(module):
            return "left", f"{activation} is one pass by torch, too; with the products around it, it is Fusible's"
        return self._swapped(name, activation_swap(module, activation, self._recipe), f"{type(module).__name__} as {activation}")

    def _experts(self, name: str, module: Any, activations: dict[str, str]) -> tuple[Outcome, str]:
        place, activation = next(iter(activations.items()), ("", ""))
        wrong = why_no_experts(module, list(activations), activation)
        if wrong:
            return "left", wrong
        count, rows, columns = module.gate_up_proj.shape
        return self._swapped(name, experts_swap(module, place, activation, self._recipe), f"{count} of {columns} -> {rows // 2} -> {columns}")

    def _attention(self, model: nn.Module) -> Iterator[Layer]:
        """The models of transformers inside, whose attention is an implementation that they look up by name."""
        for name, module, config in attention_configs(model):
            why = self._selection.why_not(name, module) or why_no_attention(module, config)
            self.configs += [] if why else [config]
            yield Layer(name or type(module).__name__, "attention", "left" if why else "converted", why or TEXT)

    def _swapped(self, name: str, one: Swap, text: str) -> tuple[Outcome, str]:
        self.swaps.append(one)
        self._converted.add(name)
        return "converted", text

    def _look_at_block(self, name: str, module: nn.Module, found: dict[str, Layer]) -> None:
        """A module around layers: whether several of these are to compute as one."""
        prefix = f"{name}." if name else ""
        activations = {own: self._activations[prefix + own] for own in module._modules if prefix + own in self._activations}
        if is_like_experts(module):
            found[name] = Layer(name, "expert stack", *self._experts(name, module, activations))
            return
        linears = [own for own, child in module._modules.items() if child is not None and is_like_linear(child)]
        if not linears or not all(prefix + own in self._converted for own in linears):
            return
        mlp = find_mlp(module, linears, activations)
        projections = find_projections(module) if mlp is None else None
        if mlp is not None:
            found[name] = Layer(name, "MLP", *self._swapped(name, mlp_swap(module, mlp, self._recipe), mlp.text))
        elif projections is not None:
            found[name] = Layer(name, "projection", *self._swapped(name, attention_swap(module, projections, self._recipe), projections.text))

    def _look_at_chain(self, name: str, block: nn.Module, found: dict[str, Layer]) -> None:
        """A block that calls the layers of its MLP one by one."""
        prefix = f"{name}."
        inside = {f"{prefix}{own}": own for own, _ in block.named_modules() if own}
        joined = tuple(f"{one}." for one in inside if one in found and found[one].kind in ("MLP", "expert stack"))
        activations = [full for full in inside if full in self._activations and not full.startswith(joined)]
        if name in found or "forward" in vars(block) or len(activations) != 1 or isinstance(block, Swapped) or self._selection.why_not(name, block):
            return
        linears = {own: block.get_submodule(own) for full, own in inside.items() if full in self._converted and not full.startswith(joined)}
        chosen = {own: layer for own, layer in linears.items() if isinstance(layer, nn.Linear)}
        (activation,) = activations
        chain = find_chain(block, chosen, inside[activation], self._activations[activation])
        if chain is None:
            return
        relay, formula = chain.relay(block), self._activations.pop(activation)
        self.swaps = [one for one in self.swaps if one.module is not relay.members[1]]
        self.relays.append(relay)
        text = f"{chain.up} -> {formula} -> {chain.down}{'' if chain.in_training else ', but for training'}"
        of_activation, of_block = relay_swaps(relay, formula, self._recipe)
        self.swaps.append(of_block)
        found[name] = Layer(name, "MLP", *self._swapped(activation, of_activation, text))

    def _look_at_encoder(self, name: str, module: nn.Module) -> None:
        """An encoder of torch's own: where a layer inside is converted, it is called in inference, too."""
        attributes = {} if isinstance(module, Swapped) else called_in_parts(module)
        if not attributes or not any(inside.startswith(f"{name}." if name else "") for inside in self._converted):
            return
        others = [one for one in self.swaps if one.module is not module]
        own = next((one for one in self.swaps if one.module is module), Swap(module, LayerByLayer))
        self.swaps = [*others, replace(own, attributes={**own.attributes, **attributes})]


def _kind(module: nn.Module) -> str:
    """What kind of layer a module looks like; empty where Fusible has none of the kind."""
    if is_stored_fp8(module):
        return _STORED
    if is_like_linear(module):
        return "linear"
    if is_like_norm(module):
        return "norm"
    return "activation" if is_like_activation(module) else ""


def _sizes(module: Any) -> str:
    sizes = (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (module.nx, module.nf)
    return f"{type(module).__name__} {sizes[0]} -> {sizes[1]}"
