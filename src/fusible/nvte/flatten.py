"""Conversion between nvte tensors and the flat list of framework tensors that autograd and the compiler carry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

from fusible.nvte.dtype import Type, is_quantized_type
from fusible.nvte.tensor import Tensor
from fusible.quantized import FieldStorage, Float8TensorStorage, GroupedTensorStorage, QuantizedTensor, QuantizedTensorStorage

__all__ = ["Leaf", "STORAGES", "Shell", "StorageSpec", "flatten", "flatten_storage", "unflatten", "unflatten_storage"]


STORAGES = (QuantizedTensorStorage, GroupedTensorStorage)
"""The classes of storages: each holds framework tensors, and ``get_metadata`` has all that its constructor takes."""


class StorageSpec(NamedTuple):
    """How a quantized storage was taken apart: its class, the fields that are tensors or storages themselves, and the other ones."""

    make: type[QuantizedTensorStorage] | type[GroupedTensorStorage]
    parts: tuple[tuple[str, StorageSpec | Shell | None], ...]
    rest: dict[str, Any]


class Shell(NamedTuple):
    """A storage of a user's own quantizer, without its ``count`` tensors."""

    storage: Any
    count: int


Leaf = tuple[Type, StorageSpec | Shell | None]
"""How one tensor was taken apart: its type, and its storage where it is quantized."""


def flatten_storage(storage: QuantizedTensorStorage | GroupedTensorStorage) -> tuple[list[Any], StorageSpec | Shell]:
    """The framework tensors in a storage, and what ``unflatten_storage`` needs beside them."""
    if type(storage) is Float8TensorStorage and storage._data is not None:  # the most frequent one
        names = _FLOAT8 if storage._transpose is None else _FLOAT8_BOTH
        leaves = [storage._data, storage._scale_inv] if storage._transpose is None else [storage._data, storage._scale_inv, storage._transpose]
        return leaves, StorageSpec(Float8TensorStorage, names, {"fp8_dtype": storage._fp8_dtype, "fake_dtype": storage._dtype})
    if isinstance(storage, FieldStorage) and not storage._PARTS and type(storage).get_metadata is FieldStorage.get_metadata:
        return _fields_of(storage)
    if isinstance(storage, QuantizedTensor):
        storage = storage.storage_without_autograd()
    if not isinstance(storage, (FieldStorage, GroupedTensorStorage)):
        copied: Any = copy(storage)
        tensors, shell = copied.prepare_for_saving()
        return list(tensors), Shell(shell, len(tensors))
    leaves: list[Any] = []
    parts: list[tuple[str, StorageSpec | Shell | None]] = []
    rest: dict[str, Any] = {}
    for name, value in storage.get_metadata().items():
        if isinstance(value, STORAGES):
            inner, spec = flatten_storage(value.storage_without_autograd() if isinstance(value, QuantizedTensor) else value)
            leaves += inner
            parts.append((name, spec))
        elif hasattr(value, "shape"):
            leaves.append(value)
            parts.append((name, None))
        else:
            rest[name] = value
    return leaves, StorageSpec(type(storage), tuple(parts), rest)


def _fields_of(storage: FieldStorage) -> tuple[list[Any], StorageSpec]:
    """Of a storage of tensors alone, or of the tensor that has its fields: ``get_metadata``, sorted, without a dictionary of all."""
    leaves: list[Any] = []
    parts: list[tuple[str, None]] = []
    rest: dict[str, Any] = {}
    for name, attribute in storage._TENSORS.items():
        value = getattr(storage, attribute)
        if value is None:
            rest[name] = None
        else:
            leaves.append(value)
            parts.append((name, None))
    for name in storage._OPTIONS:
        rest[name] = getattr(storage, f"_{name}")
    rest["quantizer"], rest["fake_dtype"] = storage._quantizer, storage._dtype
    return leaves, StorageSpec(storage._STORAGE if isinstance(storage, QuantizedTensor) else type(storage), tuple(parts), rest)


_FLOAT8: tuple[tuple[str, None], ...] = (("data", None), ("fp8_scale_inv", None))
_FLOAT8_BOTH = (*_FLOAT8, ("data_transpose", None))


def unflatten_storage(leaves: Iterator[Any], spec: StorageSpec | Shell) -> Any:
    """The inverse of ``flatten_storage``: takes its tensors, which may be another framework's, from ``leaves``."""
    if isinstance(spec, Shell):
        storage = copy(spec.storage)
        storage.restore_from_saved([next(leaves) for _ in range(spec.count)])
        return storage
    fields = {name: next(leaves) if inner is None else unflatten_storage(leaves, inner) for name, inner in spec.parts}
    return spec.make(**fields, **spec.rest)


def flatten(tensors: Iterable[Tensor]) -> tuple[list[Any], list[Leaf]]:
    """The framework tensors of ``tensors`` in order, and what ``unflatten`` needs to put them together again."""
    leaves: list[Any] = []
    spec: list[Leaf] = []
    for tensor in tensors:
        data = tensor.data
        if is_quantized_type(tensor.type):
            parts, storage = flatten_storage(data)
            leaves += parts
            spec.append((tensor.type, storage))
        else:
            leaves.append(data)
            spec.append((tensor.type, None))
    return leaves, spec


def unflatten(leaves: Sequence[Any], spec: Iterable[Leaf]) -> list[Tensor]:
    """The inverse of ``flatten``; the leaves may be tensors of another framework."""
    values = iter(leaves)
    return [Tensor(next(values) if storage is None else unflatten_storage(values, storage), type) for type, storage in spec]
