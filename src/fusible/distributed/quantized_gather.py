"""Weights that FSDP2 shares out as they are held, and gathers in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from fusible.errors import ArgumentError, expected
from fusible.pytorch.engine.shares import laid_out_like, local_of
from fusible.pytorch.engine.weights import without_unread_copy
from fusible.pytorch.modules.base import BaseModule
from fusible.pytorch.product_weights import (
    WEIGHT,
    HeldWeight,
    check_layout,
    check_quantizes,
    quantized_together,
    quantizer_of_weight,
    weights_of_products,
)
from fusible.quantized import DelayedScalingRequest, QuantizedTensor, Quantizer, Recipe, quantizer_for_role
from fusible.tex.calls.transaction import run

__all__ = ["gather_quantized", "gathers_quantized"]

M = TypeVar("M", bound=nn.Module)
_aten = torch.ops.aten
_KEPT = {
    _aten.alias.default, _aten.detach.default, _aten.view.default, _aten.slice.Tensor, _aten.as_strided.default, _aten.split.Tensor,
    _aten.clone.default, _aten._to_copy.default, _aten.new_zeros.default, _aten.new_empty.default, _aten.empty_like.default,
    _aten._pin_memory.default,
}  # fmt: skip
"""Operations by which a weight is shared out, moved, copied or given memory: what they make is such a weight, too. What others make is a tensor."""


class GatheredQuantized(torch.Tensor):
    """A weight, or a shard of one, in high precision, which FSDP2 gathers as ``quantizer`` quantizes it: by the largest magnitude of all shards,
    where that is how it scales; of weights of experts, held as one, each by its own. To everything else it is the tensor of its values."""

    _quantizer: Quantizer
    _parts: Mapping[str, int]
    """The module's names of what a product takes as one weight with this, which are scaled alike, and the rows of each before it is shared out."""
    _name: str
    """Which of them this is."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, quantizer: Quantizer, parts: Mapping[str, int], name: str) -> GatheredQuantized:
        made = torch.Tensor._make_subclass(cls, values.detach(), values.requires_grad)
        made._quantizer, made._parts, made._name = quantizer, parts, name
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C._DisableTorchDispatch():
            found = func(*args, **(kwargs or {}))
        if func not in _KEPT:
            return found
        like = args[0]._quantizer, args[0]._parts, args[0]._name
        return [cls(part, *like) for part in found] if isinstance(found, (list, tuple)) else cls(found, *like)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved, it is the tensor of its values."""
        return self._values().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return self._values().numpy(force=force)

    def _values(self) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            return torch.Tensor._make_subclass(torch.Tensor, self.detach())

    def fsdp_pre_all_gather(self, mesh: DeviceMesh, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any) -> tuple[Any, Any]:
        """``(buffers, metadata)`` of this shard, quantized; where rows do not divide by the processes, or a shard would cut blocks, its values."""
        values, count = self._values(), mesh.size()
        rows = -(-orig_size[0] // count)
        if (quantized := self._quantized(mesh, module)) is not None:
            buffers, meta = quantized.fsdp_pre_all_gather(mesh, orig_size, contiguous_orig_stride, module, mp_policy)
            return buffers, (quantized, meta)
        padded = values.new_zeros(rows, *orig_size[1:], dtype=mp_policy.param_dtype or values.dtype)
        padded[: len(values)] = values
        return (padded,), None

    def _quantized(self, mesh: DeviceMesh, module: Any) -> QuantizedTensor | None:
        """This shard, quantized with those of the other parts, each of which does so for itself; None, in all processes alike, where one of them does
        not divide, or would cut blocks."""
        if any(rows % mesh.size() for rows in self._parts.values()):
            return None
        parts = {name: self if name == self._name else local_of(module._parameters[name]) for name in self._parts}
        shards = [part._values().to(self.device) for part in parts.values()]  # FSDP2 may hold them elsewhere
        if not all(self._quantizer.is_quantizable(shard if shard.dim() == 2 else shard[0]) for shard in shards):
            return None
        made = quantized_together(shards, self._quantizer, mesh.get_group())
        if made is None or any(len(shard) % each._row_step() for shard, each in zip(shards, made, strict=True)):
            return None
        return dict(zip(parts, made, strict=True))[self._name]

    def fsdp_post_all_gather(self, all_gather_outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        """The whole weight, quantized, and what FSDP2 may free; as of ``QuantizedTensor``. Along ``tp`` FSDP2 gives the ``DTensor`` around it."""
        if metadata is None:
            return None if out is not None else (all_gather_outputs[0], all_gather_outputs)
        quantized, meta = metadata
        return quantized.fsdp_post_all_gather(all_gather_outputs, meta, param_dtype, out=local_of(out))


def gathers_quantized(model: nn.Module, recipe: Recipe) -> bool:
    """Whether ``gather_quantized`` takes ``recipe``: weights are scaled by their own magnitudes; and ``model``: no weight is quantized already."""
    found = [quantizer_of_weight(recipe, weight) for _, weight in _weights(model)] or [quantizer_for_role(recipe.immutable(), WEIGHT)]
    own = any(isinstance(each, Quantizer) for each in found) and not any(isinstance(each, DelayedScalingRequest) for each in found)
    return own and not any(isinstance(local_of(p), QuantizedTensor) for p in model.parameters())


def _weights(model: nn.Module) -> list[tuple[BaseModule, HeldWeight]]:
    """The weights of products, each with the module that has it."""
    modules = [module for module in model.modules() if isinstance(module, BaseModule)]
    return [(module, weight) for module in modules for weight in weights_of_products(module.local_ops(), module._parameters, module.shares)]


def gather_quantized(model: M, recipe: Recipe) -> M:
    """Let FSDP2 gather the weights of products in ``model`` as ``recipe`` quantizes them, and give the model back. To be called before
    ``fully_shard``, and after ``parallelize`` where that lays the model out, in all processes.

    Processes go on holding, stepping and saving their shards as they are, in float32 say. Each quantizes its own before it is sent, by the largest
    magnitude in all of them where a scale is for the whole weight: so passes under ``recipe`` give what they give without, to the bit. Of a weight
    of [n, k] that one copy serves, as of ``Float8CurrentScaling`` and ``Float8BlockScaling``, n * k bytes are gathered, and scales; of MXFP8, whose
    rows and columns have values of their own, 2 * n * k. Experts that are held as one are quantized each by itself, in the process that has it. What
    is no product's weight, or is another module's parameter too (an embedding's), keys of which processes along ``tp`` take parts, and a weight that
    processes cannot share out in whole rows of blocks, or in whole experts, are gathered as they are held.

    Raises ``ArgumentError`` for a recipe that quantizes no weights, or by scales that a module keeps (``DelayedScaling``; under ``autocast`` of it,
    too, weights may be gathered by ``Float8CurrentScaling``), and for a model under ``fully_shard``, before anything is changed.
    """
    of, weights = "gather_quantized", _weights(model)
    check_quantizes(recipe, (weight for _, weight in weights), of)
    quantizers = [quantizer_of_weight(recipe, weight) for _, weight in weights]
    if any(isinstance(quantizer, DelayedScalingRequest) for quantizer in quantizers):
        do = "give Float8CurrentScaling(), under whichever recipe the model is called"
        raise ArgumentError(expected("a recipe that scales weights by their own magnitudes", of=of, got=repr(recipe), do=do))
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        got = "one under fully_shard"
        raise ArgumentError(expected("a model whose parameters FSDP does not share out yet", of=of, got=got, do="call it before fully_shard"))
    for module, weight in weights:
        check_layout(module, weight, of)
    taken = {(module, name) for module, weight in weights for name in weight.parts}
    tied = {id(p) for module in model.modules() for name, p in module._parameters.items() if (module, name) not in taken}  # others read its values
    made: dict[int, nn.Parameter] = {}
    for (_, weight), quantizer in zip(weights, quantizers, strict=True):
        if not isinstance(quantizer, Quantizer):
            continue
        parts = {name: len(local_of(part)) for name, part in weight.parts.items()}
        if any(lines is not None for lines in weight.share.lines) or any(id(p) in tied for p in weight.parts.values()):
            continue
        for name, part in weight.parts.items():
            new = made[id(part)] = laid_out_like(
                part, GatheredQuantized(local_of(part), without_unread_copy(quantizer), parts, name), part.requires_grad
            )
            vars(new).update(vars(part))
    places = [(module, name, part) for module, weight in weights for name, part in weight.parts.items() if id(part) in made]
    run([partial(module._parameters.__setitem__, name, made[id(part)]) for module, name, part in places])
    return model
