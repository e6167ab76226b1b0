"""Experts that are held as stacks of weights, as transformers holds those of Mixtral and Qwen: their products are grouped ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fusible import ops
from fusible.models.convert.activation import FORMULAS, GATED, TITLES
from fusible.models.convert.as_found import AsFound, are_looked_at
from fusible.models.convert.linear import BoundParts, why_no_parameters
from fusible.models.convert.pipelines import ConvertedModule, ConvertedRunner, placeholder, quantizes
from fusible.models.convert.swapping import Swap
from fusible.models.convert.trying import computes, draw, tried
from fusible.pytorch.engine.autocast import OUTSIDE
from fusible.pytorch.engine.bound import BoundOp
from fusible.pytorch.engine.chain import ChainCall
from fusible.pytorch.engine.lowered import is_exporting, lowered_call
from fusible.pytorch.engine.runner import PipelineRunner
from fusible.quantized import Recipe

__all__ = ["ConvertedExperts", "experts_swap", "is_like_experts", "why_no_experts"]

_UP, _DOWN = "gate_up_proj", "down_proj"
_SIDES = ("experts", "probs")
_BLOCK = 32


class ExpertsRunner(ConvertedRunner):
    """A pipeline whose first op is told by the caller which experts a token goes to, and whose last one with which weights."""

    def _take(self, entries: tuple[BoundOp, ...]) -> None:
        super()._take(entries)
        self.sides = _SIDES


class ConvertedExperts(ConvertedModule):
    """``y[t] = sum_k p[t, k] * down_e(act(gate_e(x[t])) * up_e(x[t]))`` with ``e = index[t, k]``: tokens are sorted by expert, each expert's products
    are quantized by themselves, and a token's experts are summed in fp32.

    Within a graph of ``torch.compile``, or where weights cannot be cut into whole blocks of a format, its former class computes it, unquantized.
    ``fell_back`` says so. A program of ``torch.export`` has them unquantized too.
    """

    _top_k: int
    _activation: nn.Module
    _place: str
    """Where that was when it was converted."""
    _as_found: AsFound
    fell_back: str
    """Why the former class computed the latest call, or, before the first one, is going to; empty where the pipeline did."""

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        if is_exporting():  # the former class asks how many tokens an expert has
            return lowered_call(self.pipeline(0), hidden_states, (top_k_index, top_k_weights), ChainCall(), OUTSIDE)
        recipe = self._in_force()
        if torch.compiler.is_compiling() or self._is_plain(recipe):
            return self.original.forward(self, hidden_states, top_k_index, top_k_weights)
        why = why_by_its_class(self, recipe) or self._why_not(hidden_states, top_k_index)
        if why != self.fell_back:
            vars(self)["fell_back"] = why
        if why:
            return self.original.forward(self, hidden_states, top_k_index, top_k_weights)
        sides = top_k_index.to(torch.int32).contiguous(), top_k_weights.float()
        return self._pipeline_now().run(hidden_states, sides, {})[0]

    def _why_not(self, x: torch.Tensor, index: torch.Tensor) -> str:
        """Why a call is left to the former class; empty where the pipeline computes what is asked for."""
        if x.ndim != 2:
            return f"x was of {x.ndim} dimensions"
        if index.shape[-1] != self._top_k:
            return f"a token had {index.shape[-1]} experts, where the configuration says {self._top_k}"
        if self._modules.get(self._place) is not self._activation or not self._as_found.holds():
            return "its activation, or the shape of its weights, is another one than when it was converted"
        return "its activation has hooks" if are_looked_at([self._activation]) else ""

    def follow(self, recipe: Recipe | None) -> None:
        super().follow(recipe)
        vars(self)["fell_back"] = why_by_its_class(self, recipe)

    def _new_runner(self, bound: tuple[BoundOp, ...]) -> PipelineRunner:
        return ExpertsRunner(bound, self._own)

    def local_ops(self) -> tuple[Any, ...]:
        return ()


def why_by_its_class(module: nn.Module, recipe: Recipe | None) -> str:
    """Why a module's own class computes its experts under a recipe, unquantized; empty where the pipeline does."""
    if not quantizes(recipe):
        return ""
    up = module._parameters.get(_UP)
    if up is None or recipe is None:  # as PEFT's adapters do
        return "its weights are computed from other parameters"
    if vars(module).get("_is_expert_parallel"):
        return "its experts are shared out among processes"
    whole = recipe.float8_per_tensor_scaling() or recipe.high_precision() or (up.shape[1] % (2 * _BLOCK) == 0 and up.shape[2] % _BLOCK == 0)
    return "" if whole else f"its weights {list(up.shape)} cannot be cut into blocks of {_BLOCK} for {type(recipe).__name__}"


def is_like_experts(module: nn.Module) -> bool:
    """Whether a module holds stacks of weights by the names that transformers gives them."""
    weights = [module._parameters.get(name) for name in (_UP, _DOWN)]
    return all(weight is not None and weight.ndim == 3 for weight in weights)


def why_no_experts(module: Any, activations: Sequence[str], name: str) -> str:
    """Why a module that ``is_like_experts`` is left; empty where it is converted. ``activations``: the modules inside that are of ours; ``name``: of
    the first of ``tex.activations``."""
    up, down = (module._parameters[name] for name in (_UP, _DOWN))
    if len([1 for parameter in module._parameters.values() if parameter is not None]) != 2:
        return "it has other parameters than two stacks of weights"
    if up.shape != (down.shape[0], 2 * down.shape[2], down.shape[1]):
        return f"its weights are {list(up.shape)} and {list(down.shape)}"
    if len(activations) != 1 or not _top_k(module):
        return "it does not say its activation, or how many experts a token has"
    wrong = why_no_parameters(module)
    return wrong or ("" if _is_usual(module, activations[0], name) else "it computes no sum of gated experts")


def _top_k(module: Any) -> int:
    config = vars(module).get("config")
    found = [getattr(config, name, None) for name in ("num_experts_per_tok", "num_experts_per_token", "top_k")]
    return next((count for count in found if isinstance(count, int)), 0)


def _is_usual(module: Any, place: str, name: str) -> bool:
    """Whether a small copy gives the sum of gated experts."""
    count, width, inner, rows = module._parameters[_UP].shape[0], 8, 12, 6
    weights: dict[str, Any] = {_UP: nn.Parameter(draw(count, 2 * inner, width)), _DOWN: nn.Parameter(draw(count, width, inner, seed=1))}
    x, probs = draw(rows, width, seed=2), draw(rows, 2, seed=3).abs()
    index = torch.stack([torch.arange(rows, device="cpu") % count, (torch.arange(rows, device="cpu") + 1) % count], 1)
    a, b = torch.einsum("tkih,th->tki", weights[_UP][index], x).chunk(2, -1)
    wanted = torch.einsum("tkhi,tki,tk->th", weights[_DOWN][index], FORMULAS[name](a) * b, probs).detach()
    inside = {place: module._modules[place]}
    return all(computes(tried(module, x, weights, inside, (index, probs), training=training), wanted) for training in (False, True))


def experts_swap(module: Any, place: str, name: str, recipe: Recipe | None) -> Swap:
    """The swap of experts for which ``why_no_experts`` says nothing, of the activation ``name`` at a ``place`` inside."""
    up, down = (module._parameters[own] for own in (_UP, _DOWN))
    count, top_k, sizes = len(up), _top_k(module), ("sizes_up", "sizes_down")
    first, second = (ops.GroupedMMT(count, [placeholder(weight)]).with_(side_inputs=(own,)) for weight, own in zip((up, down), sizes, strict=True))
    parts: list[BoundParts] = [
        (ops.DispatchTokens(count, top_k, sizes), module, ()),
        (first, module, (_UP,)),
        (getattr(ops, TITLES[GATED[name]])(), module, ()),
        (second, module, (_DOWN,)),
        (ops.CombineTokens(), module, ()),
    ]
    attributes = ConvertedExperts.attributes(module, parts, recipe)
    activation = module._modules[place]
    own = {"_top_k": top_k, "_activation": activation, "_place": place, "_as_found": AsFound.of([activation], [module])}
    own["fell_back"] = why_by_its_class(module, recipe)
    return Swap(module, ConvertedExperts, {**attributes, **own})
