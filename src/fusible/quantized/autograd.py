"""Quantized tensors among the tensors that an autograd function saves, which takes plain tensors alone. Names are those of ``transformer_engine``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusible.errors import ArgumentError, expected
from fusible.quantized.storage import QuantizedTensorStorage

__all__ = ["is_quantized_tensor", "prepare_for_saving", "restore_from_func_ctx", "restore_from_saved"]


def is_quantized_tensor(tensor: Any) -> bool:
    """Whether ``tensor`` is quantized: a ``torch.Tensor`` that is, or a bare storage."""
    return isinstance(tensor, QuantizedTensorStorage)


def prepare_for_saving(*tensors: Any) -> tuple[list[torch.Tensor | None], list[Any]]:
    """``(plain, objects)``: the tensors that ``ctx.save_for_backward`` takes, and what ``restore_from_saved`` makes ``tensors`` of again.

    A ``torch.Tensor``, quantized or not, and None are saved as they are, and have None among the objects. A bare storage is emptied: its tensors are
    among the plain ones, it is among the objects.
    """
    plain: list[torch.Tensor | None] = []
    objects: list[Any] = []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, torch.Tensor):
            plain.append(tensor)
            objects.append(None)
        else:
            tensors_of_part, emptied = tensor.prepare_for_saving()
            plain += tensors_of_part
            objects.append(emptied)
    return plain, objects


def restore_from_saved(tensors: Sequence[Any], saved_tensors: Sequence[torch.Tensor | None], return_saved_tensors: bool = False) -> Any:
    """The tensors that ``prepare_for_saving`` took apart, of its objects and of the plain tensors; storages are filled in place.

    ``return_saved_tensors``: ``(tensors, plain tensors that are left)``. Raises ``ArgumentError`` where there are too few plain tensors.
    """
    left = list(saved_tensors)
    found: list[Any] = []
    for tensor in tensors:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            left = tensor.restore_from_saved(left)
            found.append(tensor)
            continue
        if not left:
            do = "give all that prepare_for_saving gave"
            raise ArgumentError(expected("a plain tensor for each object", of="restore_from_saved", got=len(saved_tensors), do=do))
        found.append(left.pop(0))
    return (found, left) if return_saved_tensors else found


def restore_from_func_ctx(ctx: Any, return_saved_tensors: bool = False) -> Any:
    """``restore_from_saved`` of ``ctx.tensor_objects``, which is let go, and ``ctx.saved_tensors``. Raises ``ArgumentError`` where there are none."""
    objects = getattr(ctx, "tensor_objects", None)
    if objects is None:
        do = "set it in forward, and restore once"
        raise ArgumentError(expected("tensor_objects", of="the context of restore_from_func_ctx", got="none", do=do))
    found = restore_from_saved(objects, ctx.saved_tensors, return_saved_tensors)
    ctx.tensor_objects = None
    return found
