"""Weights that FSDP2 shares out as they are held, and gathers in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fusible.errors import ArgumentError, expected
from fusible.pytorch.modules.base import BaseModule
from fusible.pytorch.product_weights import WEIGHT, quantizer_of_weights, weights_of_products
from fusible.quantized import DelayedScalingRequest, Quantizer, Recipe, quantizer_for_role
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
    where that is how it scales. To everything else it is the tensor of its values."""

    _quantizer: Quantizer

    @staticmethod
    def __new__(cls, values: torch.Tensor, quantizer: Quantizer) -> GatheredQuantized:
        made = torch.Tensor._make_subclass(cls, values.detach(), values.requires_grad)
        made._quantizer = quantizer
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C._DisableTorchDispatch():
            found = func(*args, **(kwargs or {}))
        if func not in _KEPT:
            return found
        quantizer = args[0]._quantizer
        return [cls(part, quantizer) for part in found] if isinstance(found, (list, tuple)) else cls(found, quantizer)

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
        if rows * count == orig_size[0] and self._quantizer.is_quantizable(values):
            quantizer: Any = self._quantizer.copy()
            if hasattr(quantizer, "with_amax_reduction"):
                quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, mesh.get_group()
            quantized = quantizer(values)
            if rows % quantized._row_step() == 0:
                buffers, meta = quantized.fsdp_pre_all_gather(mesh, orig_size, contiguous_orig_stride, module, mp_policy)
                return buffers, (quantized, meta)
        padded = values.new_zeros(rows, *orig_size[1:], dtype=mp_policy.param_dtype or values.dtype)
        padded[: len(values)] = values
        return (padded,), None

    def fsdp_post_all_gather(self, all_gather_outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        """The whole weight, quantized, and what FSDP2 may free; as of ``QuantizedTensor``."""
        if metadata is None:
            return None if out is not None else (all_gather_outputs[0], all_gather_outputs)
        quantized, meta = metadata
        return quantized.fsdp_post_all_gather(all_gather_outputs, meta, param_dtype, out=out)


def gathers_quantized(model: nn.Module, recipe: Recipe) -> bool:
    """Whether ``gather_quantized`` takes ``model`` and ``recipe``: nothing is laid out yet, and weights are scaled by their own magnitudes."""
    laid_out = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return not laid_out and isinstance(quantizer_for_role(recipe.immutable(), WEIGHT), Quantizer)


def gather_quantized(model: M, recipe: Recipe) -> M:
    """Let FSDP2 gather the weights of products in ``model`` as ``recipe`` quantizes them, and give the model back. To be called before
    ``fully_shard``, in all processes.

    Processes go on holding, stepping and saving their shards as they are, in float32 say. Each quantizes its own before it is sent, by the largest
    magnitude in all of them where a scale is for the whole weight: so passes under ``recipe`` give what they give without, to the bit. Of a weight
    of [n, k] that one copy serves, as of ``Float8CurrentScaling`` and ``Float8BlockScaling``, n * k bytes are gathered, and scales; of MXFP8, whose
    rows and columns have values of their own, 2 * n * k. What is no product's weight, or is another module's parameter too (an embedding's),
    experts that are held as one, and a weight that processes cannot share out in whole rows of blocks, are gathered as they are held.

    Raises ``ArgumentError`` for a recipe that quantizes no weights, or by scales that a module keeps (``DelayedScaling``; under ``autocast`` of it,
    too, weights may be gathered by ``Float8CurrentScaling``), and for a model that is laid out already, before anything is changed.
    """
    of, quantizer = "gather_quantized", quantizer_of_weights(recipe, "gather_quantized")
    if isinstance(quantizer, DelayedScalingRequest):
        do = "give Float8CurrentScaling(), under whichever recipe the model is called"
        raise ArgumentError(expected("a recipe that scales weights by their own magnitudes", of=of, got=repr(recipe), do=do))
    modules = [module for module in model.modules() if isinstance(module, BaseModule)]
    weights = [(module, own, weight) for module in modules for _, _, own, weight in weights_of_products(module.local_ops(), module._parameters)]
    for module, own, weight in weights:
        if isinstance(weight, DTensor):
            got, do = f"a {type(module).__name__} whose {own} is a DTensor", "call it before fully_shard, on a model without tensor parallelism"
            raise ArgumentError(expected("a model that is not laid out yet", of=of, got=got, do=do))
    taken = {(module, own) for module, own, _ in weights}
    tied = {id(p) for module in model.modules() for name, p in module._parameters.items() if (module, name) not in taken}  # others read its values
    alone = [weight for _, _, weight in weights if weight.dim() == 2 and id(weight) not in tied]
    made = {id(weight): nn.Parameter(GatheredQuantized(weight, quantizer), weight.requires_grad) for weight in alone}
    run([partial(module._parameters.__setitem__, own, made[id(weight)]) for module, own, weight in weights if id(weight) in made])
    return model
