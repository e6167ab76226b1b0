"""Checks of the tensors that a storage takes over: saved ones, and those gathered from its shards."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected

__all__ = ["check_saved", "gathered_fields", "whole_fields"]

_DO = "pass what fsdp_extract_buffers gave, gathered"


def gathered_fields(storage: Any, buffers: Sequence[Any], meta: dict[str, Any], what: str) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The shape and the fields of the tensor with these rows, of the kind of ``storage``. Raises ``ShapeError`` or ``DTypeError`` for buffers
    that are not those of such a tensor; nothing is written."""
    names, of_rows = meta["field_names"], storage._of_rows
    if len(buffers) != len(names):
        raise ShapeError(expected(f"{len(names)} tensors", of=what, got=len(buffers), do=_DO))
    for name, buffer in zip(names, buffers, strict=True):
        own = operator.attrgetter(name)(storage)
        if buffer.layout is not torch.strided or buffer.is_meta or (own is not None and buffer.dtype is not own.dtype):
            wanted = "a dense tensor" if own is None else f"a dense tensor of {own.dtype}"
            raise DTypeError(expected(wanted, of=f"{name} in {what}", got=f"one of {buffer.dtype}, {buffer.layout}, on {buffer.device}", do=_DO))
    try:
        shape, fields = of_rows(buffers, meta)
    except (IndexError, RuntimeError, ValueError) as error:
        got = [list(buffer.shape) for buffer in buffers]
        raise ShapeError(expected(f"rows of a {type(storage).__name__}", of=what, got=got, do=_DO)) from error
    if len(shape) != len(storage.shape) or tuple(shape[1:]) != tuple(storage.shape[1:]):
        raise ShapeError(expected(f"rows of {list(storage.shape[1:])}", of=what, got=f"those of {list(shape)}", do=_DO))
    return shape, fields


def whole_fields(storage: Any, buffers: Sequence[Any], meta: dict[str, Any]) -> dict[str, Any]:
    """The fields that ``storage`` takes over from gathered buffers. A ``torch.Tensor`` keeps its shape, so there must be as many rows."""
    what = "gathered of fsdp_assign_gathered"
    shape, fields = gathered_fields(storage, buffers, meta, what)
    if isinstance(storage, torch.Tensor) and tuple(storage.shape) != tuple(shape):
        raise ShapeError(expected(f"rows of {list(storage.shape)}", of=what, got=f"those of {list(shape)}", do="gather the rows of this tensor"))
    return fields


def check_saved(storage: Any, tensors: Sequence[Any]) -> None:
    """Raise ``ArgumentError`` or ``DTypeError`` where ``tensors`` do not begin with a tensor or None for each of the storage's own."""
    count, of, do = len(storage._TENSORS), f"tensors of {type(storage).__name__}.restore_from_saved", "pass what prepare_for_saving gave"
    if len(tensors) < count:
        raise ArgumentError(expected(f"at least {count} tensors", of=of, got=len(tensors), do=do))
    for tensor in tensors[:count]:
        if tensor is not None and not (hasattr(tensor, "shape") and hasattr(tensor, "dtype")):
            raise DTypeError(expected("a tensor or None for each of its own", of=of, got=type(tensor).__qualname__, do=do))
