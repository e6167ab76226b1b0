"""Between nvte tensors and the plain list of framework tensors that autograd and the compiler carry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fusible import tex
from fusible.nvte.dtype import Type, element, is_quantized_type
from fusible.nvte.tensor import Tensor
from fusible.quantized import Float8TensorStorage

__all__ = ["Leaf", "flatten", "unflatten"]

Leaf = tuple[Type, bool]
"""How one tensor was taken apart: its type, and whether a column-wise copy follows its data and scale."""


def flatten(tensors: Iterable[Tensor]) -> tuple[list[Any], list[Leaf]]:
    """The framework tensors of ``tensors`` in order, and what ``unflatten`` needs to put them together again."""
    leaves: list[Any] = []
    spec: list[Leaf] = []
    for tensor in tensors:
        data = tensor.data
        if is_quantized_type(tensor.type):
            copied = data._transpose is not None
            leaves += [data._data, data._scale_inv, data._transpose] if copied else [data._data, data._scale_inv]
            spec.append((tensor.type, copied))
        else:
            leaves.append(data)
            spec.append((tensor.type, False))
    return leaves, spec


def unflatten(leaves: Sequence[Any], spec: Iterable[Leaf]) -> list[Tensor]:
    """The inverse of ``flatten``; the leaves may be tensors of another framework."""
    tensors: list[Tensor] = []
    place = 0
    for type, copied in spec:
        if is_quantized_type(type):
            data, scale_inv = leaves[place], leaves[place + 1]
            transpose = leaves[place + 2] if copied else None
            place += 3 if copied else 2
            fp8_dtype = tex.DType(element(type))
            storage = Float8TensorStorage(data=data, fp8_scale_inv=scale_inv, fp8_dtype=fp8_dtype, data_transpose=transpose)
            tensors.append(Tensor(storage, type))
        else:
            tensors.append(Tensor(leaves[place], type))
            place += 1
    return tensors
