"""transformers' FP8 modules, whose weights are a byte an element already: their products are Fusible's, and the weights stay as they lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusible.models.convert.pipelines import ConvertedModule, quantizes
from fusible.models.convert.swapping import Swap
from fusible.models.fine_grained_fp8.products import grouped_product, product
from fusible.models.fine_grained_fp8.weights import why_no_weight
from fusible.quantized import Recipe

__all__ = ["is_stored_fp8", "stored_fp8_swap", "stored_fp8_text", "why_no_stored_fp8"]


class _StoredFP8(ConvertedModule):
    """A module that has the weights of a checkpoint, in FP8. The recipe says whether activations are quantized, too; how, the checkpoint does.

    On other devices than a CPU its former class computes, which has kernels there.
    """

    block_size: Any
    activation_scheme: str

    def local_ops(self) -> tuple[Any, ...]:
        return ()  # nothing of it is a pipeline

    @property
    def _quantize(self) -> bool:
        return quantizes(self._in_force())


class ConvertedFP8Linear(_StoredFP8):
    """``FP8Linear``: ``y = x @ weight.T + bias``."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        if weight.element_size() > 1 or not weight.is_cpu:
            return self.original.forward(self, input)
        parameters: Any = self._parameters
        y = product(input, weight, parameters["weight_scale_inv"], self.block_size, None, parameters["activation_scale"], quantize=self._quantize)
        return y if parameters["bias"] is None else y + parameters["bias"]


class ConvertedFP8Experts(_StoredFP8):
    """``FP8Experts``: ``y[t] = sum_k p[t, k] * down_e(act(up_e(x[t])))`` with ``e = index[t, k]``, summed in fp32; the activation is the former
    class's. Tokens are sorted by expert, and each expert has one product."""

    num_experts: int
    has_gate: bool

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        if not hidden_states.is_cpu:
            return self.original.forward(self, hidden_states, top_k_index, top_k_weights)
        top_k, experts = top_k_index.shape[-1], top_k_index.reshape(-1)
        order = experts.argsort(stable=True)
        sizes = experts.clamp(max=self.num_experts).bincount(minlength=self.num_experts + 1).tolist()[:-1]
        token = order // top_k
        module: Any = self
        hidden = self._products("gate_up_proj" if self.has_gate else "up_proj", hidden_states[token], sizes)
        hidden = module._apply_gate(hidden) if self.has_gate else module.act_fn(hidden)
        y = self._products("down_proj", hidden, sizes).float() * top_k_weights.reshape(-1)[order, None]
        return torch.zeros_like(hidden_states, dtype=torch.float32).index_add(0, token, y).to(hidden_states.dtype)

    def _products(self, name: str, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        parameters: Any = self._parameters
        weight, scale, quantize = parameters[name], parameters[f"{name}_scale_inv"], self._quantize
        scales = parameters.get(f"{name}_activation_scale")
        return grouped_product(x, weight, scale, sizes, self.block_size, activation_scales=scales, quantize=quantize)


_KINDS: dict[str, type[_StoredFP8]] = {"FP8Linear": ConvertedFP8Linear, "FP8Experts": ConvertedFP8Experts}
"""By the name of a class of transformers."""


def is_stored_fp8(module: nn.Module) -> bool:
    """Whether it is one of transformers' FP8 modules, with weights in FP8: by its structure, so that nothing has to be imported."""
    return _named(module) is not None and any(p is not None and p.element_size() == 1 for p in module._parameters.values())


def why_no_stored_fp8(module: Any) -> str:
    """Why a module that ``is_stored_fp8`` is left as it is; empty where it is converted."""
    named = _named(module)
    if named is not None and "forward" in vars(type(module)) and type(module).__name__ != named:
        return "its class has a forward of its own"
    if not all(weight is None or weight.is_cpu for weight in module._parameters.values()):
        return "it lies on another device than a CPU, where transformers has kernels"
    for name, weight in module._parameters.items():
        scale = module._parameters.get(f"{name}_scale_inv")
        if weight is None or scale is None:
            continue
        matrix, of_matrix = (weight[0], scale[0]) if weight.ndim == 3 else (weight, scale)
        why = why_no_weight(matrix, of_matrix, module.block_size)
        if why:
            return f"its {name} is of {why}"
    return "it shares its experts out to several processes" if vars(module).get("_is_expert_parallel") else ""


def stored_fp8_text(module: Any) -> str:
    """What a report says of a module that is converted."""
    blocks = "one scale" if module.block_size is None else "blocks of {}x{}".format(*module.block_size)
    if isinstance(module, nn.Linear):
        sizes = f"{module.in_features} -> {module.out_features}"
    else:
        count, rows, columns = module.down_proj.shape
        sizes = f"{count} of {rows} -> {columns} -> {rows}"
    return f"{_named(module)} {sizes}, weights as they lie, in {blocks}"


def stored_fp8_swap(module: Any, recipe: Recipe | None) -> Swap:
    """The swap of a module for which ``why_no_stored_fp8`` says nothing."""
    kind = _KINDS[_named(module) or ""]
    return Swap(module, kind, kind.attributes(module, (), recipe))


def _named(module: nn.Module) -> str | None:
    ours = (base.__name__ for base in type(module).__mro__ if base.__module__.startswith("transformers.") and base.__name__ in _KINDS)
    return next(ours, None)
