"""``get_cpu_offload_context``: activations of some layers are kept in the host's memory until backward needs them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fusible.errors import ArgumentError, expected

__all__ = ["ManualOffloadSynchronizer", "get_cpu_offload_context", "mark_not_offload"]

_STAYS = "_TE_do_not_offload"
"""The attribute by which the package, too, knows a tensor that stays where it is."""


def mark_not_offload(*tensors: Tensor | None) -> None:
    """Mark tensors that are never offloaded."""
    for tensor in tensors:
        if tensor is not None:
            setattr(tensor, _STAYS, True)


class _Kept:
    """A tensor that backward needs: on its device, or offloaded to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._device = tensor, tensor.device

    def offload(self) -> None:
        self._tensor = self._tensor.to("cpu")

    def reload(self) -> Tensor:
        self._tensor = self._tensor.to(self._device)
        return self._tensor


def _may_move(tensor: Tensor) -> bool:
    return not isinstance(tensor, torch.nn.Parameter) and not getattr(tensor, _STAYS, False)


class ManualOffloadSynchronizer:
    """By this object the caller says when a layer's tensors are offloaded and reloaded. Layers are numbered in the order of their contexts, from 0
    again after ``num_layers``.

    A layer for which nothing is called stays on its device. One that is not reloaded by hand is reloaded when backward comes to it. Copies are
    synchronous: ``retain_pinned_cpu_buffers`` and ``offload_stream`` change no result.
    """

    def __init__(self, num_layers: int, retain_pinned_cpu_buffers: bool = False, offload_stream: Any = None) -> None:
        self.num_layers, self.offload_stream = num_layers, offload_stream
        self._layers: list[list[weakref.ref[_Kept]]] = [[] for _ in range(num_layers)]
        self._current = -1

    def _begin(self) -> None:
        """The next layer's context opens: forget what an earlier pass kept of the layer."""
        self._current = (self._current + 1) % self.num_layers
        self._layers[self._current] = []

    def _end(self) -> None:
        """Its context closes."""

    def _pack(self, tensor: Tensor) -> Tensor | _Kept:
        if not _may_move(tensor):
            return tensor
        kept = _Kept(tensor)
        self._layers[self._current].append(weakref.ref(kept))  # the graph holds it, until its backward has been
        return kept

    def _of(self, layer_id: int) -> Iterator[_Kept]:
        """What a graph still holds of a layer."""
        yield from (kept for each in self._layers[layer_id] if (kept := each()) is not None)

    def start_offload_layer(self, layer_id: int) -> None:
        """Offload a layer's tensors to the host."""
        for kept in self._of(layer_id):
            kept.offload()

    def release_activation_forward_gpu_memory(self, layer_id: int) -> None:
        """Does nothing: the layer's memory on the device was free when ``start_offload_layer`` returned."""

    def start_reload_layer(self, layer_id: int) -> None:
        """Copy a layer's tensors back to their device."""
        for kept in self._of(layer_id):
            kept.reload()


class _First(ManualOffloadSynchronizer):
    """Offloads the first layers as their contexts close."""

    def __init__(self, num_layers: int, offloaded: int) -> None:
        super().__init__(num_layers)
        self._offloaded = offloaded

    def _end(self) -> None:
        if self._current < self._offloaded:
            self.start_offload_layer(self._current)


class _OffloadContext(ContextDecorator):
    def __init__(self, synchronizer: ManualOffloadSynchronizer) -> None:
        self._synchronizer = synchronizer
        self._hooks: saved_tensors_hooks | None = None

    def __enter__(self) -> _OffloadContext:
        if self._hooks is not None:
            do = "leave it, and call the synchronization function"
            raise ArgumentError(expected("one layer", of="an offload context at a time", got="another within it", do=do))
        self._synchronizer._begin()
        self._hooks = saved_tensors_hooks(self._synchronizer._pack, _unpacked)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(*error)
        self._synchronizer._end()


def _unpacked(kept: Tensor | _Kept) -> Tensor:
    return kept.reload() if isinstance(kept, _Kept) else kept


def _synchronized(tensor: Tensor) -> Tensor:
    """A layer's output as it is: copies are synchronous. Raises ``ArgumentError`` for one that records no gradients."""
    if not tensor.requires_grad:
        do = "call it on the output of a layer that records gradients"
        raise ArgumentError(expected("a tensor that requires gradients", of="the synchronization function of offloading", got="another", do=do))
    return tensor


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple[Any, ...]:
    """``(context, synchronize)``: each of ``model_layers`` layers is called within ``context``, and its output goes through ``synchronize``. What
    backward needs of the first ``num_layers`` is kept by the host; parameters stay.

    ``manual_synchronization``: ``(context, synchronize, controller)``, and the controller (``ManualOffloadSynchronizer``) says when;
    ``offload_stream`` is for it alone. ``offload_weights`` and ``double_buffering`` are former options and change nothing. Raises ``ArgumentError``
    where no layer would be left, and where nothing is to be offloaded.
    """
    nothing: tuple[Any, ...] = (nullcontext(), _same, None) if manual_synchronization else (nullcontext(), _same)
    if not enabled:
        return nothing
    of = "get_cpu_offload_context"
    if not offload_weights and not offload_activations:
        raise ArgumentError(expected("something to offload", of=of, got="neither activations nor weights", do="pass offload_activations=True"))
    if offload_weights:
        warnings.warn("offload_weights of get_cpu_offload_context has no effect", DeprecationWarning, stacklevel=2)
        if not offload_activations:
            return nothing
    if manual_synchronization:
        controller = ManualOffloadSynchronizer(model_layers, retain_pinned_cpu_buffers, offload_stream)
        return _OffloadContext(controller), _synchronized, controller
    if offload_stream is not None:
        raise ArgumentError(expected("no offload_stream", of=of, got="one", do="pass manual_synchronization=True too"))
    if num_layers is None or num_layers > model_layers - 1:
        do = "keep the last layer, or pass manual_synchronization=True"
        raise ArgumentError(expected(f"at most {model_layers - 1} of {model_layers} layers", of=of, got=num_layers, do=do))
    if num_layers == model_layers - 1:
        warnings.warn("offloading all layers but one leaves nothing for copies to run beside", stacklevel=2)
    return _OffloadContext(_First(model_layers, num_layers)), _synchronized


_same: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731 - what is given where nothing is offloaded
