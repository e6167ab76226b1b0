"""Right calls of the methods of quantizers and of quantized tensors, from which bad calls are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fusible.quantized import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fusible.tex import DType

__all__ = ["MAKERS", "Right", "methods_of", "right_calls"]

E4M3 = DType.kFloat8E4M3
MAKERS: dict[str, Callable[[], Any]] = {
    "delayed": lambda: Float8Quantizer(torch.tensor([16.0]), torch.zeros(1), E4M3),
    "current": lambda: Float8CurrentScalingQuantizer(E4M3),
    "block": lambda: Float8BlockQuantizer(E4M3),
    "mxfp8": lambda: MXFP8Quantizer(E4M3),
    "nvfp4": NVFP4Quantizer,
    "hybrid": lambda: HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=NVFP4Quantizer()),
    "identity": IdentityQuantizer,
}
"""A quantizer of each class."""


def values() -> torch.Tensor:
    return torch.linspace(-2, 2, 128 * 64).reshape(128, 64)


@dataclass(frozen=True)
class Right:
    """``arguments()`` of the method ``name`` of what ``make()`` gives."""

    kind: str
    name: str
    make: Callable[[], Any]
    arguments: Callable[[], dict[str, Any]]

    def call(self, subject: Any, arguments: dict[str, Any]) -> Any:
        return getattr(subject, self.name)(**arguments)


def methods_of(cls: type) -> Iterator[str]:
    """The public methods that a class has from us."""
    for name in dir(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        value = vars(owner).get(name)
        is_method = inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)
        if is_method and owner.__module__.startswith("fusible.") and not name.startswith("_"):
            yield name


def _quantizer_arguments(make: Callable[[], Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    flag = lambda: torch.zeros(1)  # noqa: E731
    return {
        "__call__": lambda: {"tensor": values(), "out": None},
        "alloc_tensors": lambda: {"shape": [128, 64], "device": None},
        "calibrate": lambda: {"tensor": values()},
        "convert_shape_for_fp4": lambda: {"shape": [128, 64]},
        "create_metadata": lambda: {"shape": [128, 64], "dtype": torch.float32, "requires_grad": False},
        "get_columnwise_shape": lambda: {"shape": [128, 64]},
        "get_scale_shape": lambda: {"shape": [128, 64], "columnwise": False},
        "inner_tensor_specs": lambda: {"shape": [128, 64]},
        "is_quantizable": lambda: {"inp": values()},
        "make_empty": lambda: {"shape": [128, 64], "dtype": torch.float32, "device": "cpu", "requires_grad": False, "pin_memory": False},
        "multi_quantize": lambda: {"list_of_tensors": [values(), values()]},
        "quantize": lambda: {"tensor": values(), "out": None, "dtype": None},
        "quantize_impl": lambda: {"tensor": values()},
        "quantizes_like": lambda: {"other": make()},
        "set_usage": lambda: {"rowwise": None, "columnwise": None},
        "storage_metadata": lambda: {"fake_dtype": torch.float32},
        "take_state_of": lambda: {"other": make()},
        "update_quantized": lambda: {"src": values(), "dst": make()(values()), "noop_flag": flag()},
        "with_usages": lambda: {"rowwise": True, "columnwise": True},
    }


def _tensor_arguments(make: Callable[[], Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    other = lambda: make()(values())  # noqa: E731
    return {
        "copy_from_storage": lambda: {"src": other()},
        "dequantize": lambda: {"dtype": torch.float32},
        "fsdp_assign_gathered": lambda: dict(zip(("gathered", "meta"), other().fsdp_extract_buffers(), strict=True)),
        "joined": lambda: {"parts": [other(), other()]},
        "make_like": lambda: {"tensor": other(), "shape": None, "dtype": None, "requires_grad": False},
        "fsdp_post_all_gather": lambda: gathered(other()),
        "fsdp_pre_all_gather": lambda: dict.fromkeys(("mesh", "orig_size", "contiguous_orig_stride", "module", "mp_policy")),
        "operand": lambda: {"columnwise": False},
        "quantize_": lambda: {"tensor": values(), "noop_flag": torch.zeros(1)},
        "restore_from_saved": lambda: {"tensors": other().prepare_for_saving()[0]},
        "size": lambda: {"dim": 0},
        "update_quantizer": lambda: {"quantizer": make()},
        "update_usage": lambda: {"rowwise_usage": True, "columnwise_usage": None},
    }


def gathered(tensor: Any) -> dict[str, Any]:
    buffers, metadata = tensor.fsdp_pre_all_gather(None, None, None, None, None)
    return {"all_gather_outputs": buffers, "metadata": metadata, "param_dtype": torch.float32, "out": None}


def right_calls() -> list[Right]:
    """Of every public method that takes an argument."""
    found = []
    for kind, make in MAKERS.items():
        quantizer, tensor = make(), make()(values())
        for subject, made, arguments in (
            (quantizer, make, _quantizer_arguments(make)),
            (tensor, lambda make=make: make()(values()), _tensor_arguments(make)),
        ):
            for name in ("__call__", *methods_of(type(subject))) if subject is quantizer else methods_of(type(subject)):
                if name in arguments:
                    found.append(Right(f"{kind} {type(subject).__name__}", name, made, arguments[name]))
    return found
