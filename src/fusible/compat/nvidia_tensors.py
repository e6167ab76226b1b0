"""The classes of NVIDIA's Python package, registered with tex: what tex reads of its quantizers and tensors, and how it makes its tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

import torch

from fusible import tex
from fusible.tex.calls.grouped import register_grouped_factory

__all__ = ["register_classes"]

_FORMATS = {
    "Float8Quantizer": ("delayed", "Float8Tensor", "Float8TensorStorage"),
    "Float8CurrentScalingQuantizer": ("current", "Float8Tensor", "Float8TensorStorage"),
    "Float8BlockQuantizer": ("block", "Float8BlockwiseQTensor", "Float8BlockwiseQTensorStorage"),
    "MXFP8Quantizer": ("mxfp8", "MXFP8Tensor", "MXFP8TensorStorage"),
    "NVFP4Quantizer": ("nvfp4", "NVFP4Tensor", "NVFP4TensorStorage"),
}
"""By quantizer class: its scaling, and the classes of the tensors and storages that it makes."""

_STORAGES = {
    "Float8TensorStorage": ("float8", "_fp8_dtype", ("_data", "_transpose")),
    "Float8BlockwiseQTensorStorage": ("block", "_fp8_dtype", ("_rowwise_data", "_columnwise_data")),
    "MXFP8TensorStorage": ("mxfp8", "_fp8_dtype", ("_rowwise_data", "_columnwise_data")),
    "NVFP4TensorStorage": ("nvfp4", "_fp4_dtype", ("_rowwise_data", "_columnwise_data")),
}
"""By storage class: the format, and the attributes that hold its element type and its data."""

_RENAMED = {"scale_inv": "fp8_scale_inv"}
"""The constructor arguments of NVIDIA's classes are tex's field names but for this one."""


def register_classes(package: ModuleType) -> None:
    """Register the quantizers and tensors of ``transformer_engine.pytorch.tensor``."""
    for quantizer, (scaling, tensor, storage) in _FORMATS.items():
        tex.register_kind(getattr(package, quantizer), _kind_of_quantizer(scaling))
        tex.register_factory(getattr(package, quantizer), _factory(getattr(package, tensor), getattr(package, storage)))
    for storage, (name, dtype, data) in _STORAGES.items():
        tex.register_kind(getattr(package, storage), _kind_of_tensor(name, dtype, data))  # from which the tensor's class descends
    _register_grouped(package)


def _register_grouped(package: ModuleType) -> None:
    tensors = importlib.import_module(f"{package.__name__}.grouped_tensor")

    def make(like: Any, /, **fields: Any) -> Any:
        return (tensors.GroupedTensorStorage if like.internal else tensors.GroupedTensor)(**fields)

    for quantizer in _FORMATS:
        register_grouped_factory(getattr(package, quantizer), make)


def _kind_of_quantizer(scaling: str) -> Callable[[Any], Hashable]:
    def describe(quantizer: Any) -> Hashable:
        return scaling, quantizer.dtype, 2 * quantizer.rowwise_usage + quantizer.columnwise_usage

    return describe


def _kind_of_tensor(name: str, dtype: str, data: tuple[str, str]) -> Callable[[Any], Hashable]:
    first, second = data

    def describe(tensor: Any) -> Hashable:
        data = getattr(tensor, first)
        data = getattr(tensor, second) if data is None else data
        return name, "cpu" if data is None else data.device.type, getattr(tensor, dtype)

    return describe


def _factory(tensor_class: Any, storage_class: Any) -> Callable[..., Any]:
    def make(quantizer: Any, *, shape: Any, dtype: Any, **fields: Any) -> Any:
        fields = {_RENAMED.get(name, name): value for name, value in fields.items()}
        if quantizer.internal:
            return storage_class(quantizer=quantizer, fake_dtype=dtype, **fields)
        device = next(value.device for value in fields.values() if isinstance(value, torch.Tensor))
        return tensor_class(shape=tuple(shape), dtype=dtype, device=device, quantizer=quantizer, **fields)

    return make
