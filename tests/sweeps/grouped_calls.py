"""Right calls of the methods of grouped tensors, from which bad calls are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from quantized_calls import MAKERS, Right, gathered, methods_of

from fusible.quantized import GroupedTensor, GroupedTensorStorage

__all__ = ["FORMATS", "GROUPED", "SHAPES", "grouped", "grouped_calls", "members", "quantizer_of", "stacked"]

FORMATS: dict[str, Callable[[], Any] | None] = {"none": None, **{name: MAKERS[name] for name in ("delayed", "current", "block", "mxfp8", "nvfp4")}}
SHAPES = ((32, 128), (64, 128))
"""Of the members."""
GROUPED = [(cls, name) for cls in (GroupedTensorStorage, GroupedTensor) for name in FORMATS]


def members() -> list[torch.Tensor]:
    return [torch.linspace(-2, 2, rows * columns).reshape(rows, columns) * (place + 1) for place, (rows, columns) in enumerate(SHAPES)]


def quantizer_of(name: str) -> Any:
    make = FORMATS[name]
    return None if make is None else make()


def grouped(cls: type[Any], name: str) -> Any:
    """A filled one."""
    made = cls.make_grouped_tensor_with_shapes(len(SHAPES), SHAPES, quantizer_of(name), dtype=torch.float32)
    made.quantize(members())
    return made


def _arguments(cls: type[Any], name: str) -> dict[str, Callable[[], dict[str, Any]]]:
    other = lambda: grouped(cls, name)  # noqa: E731
    made = lambda: {"quantizer": quantizer_of(name), "device": "cpu", "dtype": torch.float32}  # noqa: E731
    sizes = lambda: {"first_dims": torch.tensor([32, 64]), "last_dims": None, "logical_first_dim": 96, "logical_last_dim": 128}  # noqa: E731
    rowwise = {"num_tensors": 2, "tensor_shape": (32, 64), "dtype": None, "internal": False}
    return {
        "copy_from_storage": lambda: {"src": other()},
        "dequantize": lambda: {"dtype": torch.float32},
        "from_storage": lambda: {"storage": grouped(GroupedTensorStorage, name), "requires_grad": False},
        "make_grouped_tensor": lambda: {"num_tensors": 2, **sizes(), **made()},
        "make_grouped_tensor_from_rowwise_data": lambda: {**rowwise, "rowwise_data": torch.zeros(2, 32, 64)},
        "make_grouped_tensor_with_shapes": lambda: {"num_tensors": 2, "shapes": [*SHAPES], **made()},
        "make_like": lambda: {"tensor": other(), "shape": None, "dtype": None, "requires_grad": False},
        "make_tensor_offsets": lambda: {"split_dims": torch.tensor([32, 64]), "common_dim": 128},
        "quantize": lambda: {"tensors": members(), "noop_flag": torch.zeros(1)},
        "quantize_": lambda: {"tensor": torch.cat(members()), "noop_flag": torch.zeros(1)},
        "restore_from_saved": lambda: {"tensors": other().prepare_for_saving()[0]},
        "size": lambda: {"dim": 0},
    }


def stacked(name: str) -> Any:
    """One that processes may share out."""
    return GroupedTensor.of_stack(torch.linspace(-2, 2, 2 * 64 * 128).reshape(2, 64, 128), quantizer_of(name))


def _stack_arguments(name: str) -> dict[str, Callable[[], dict[str, Any]]]:
    return {
        "fsdp_assign_gathered": lambda: dict(zip(("gathered", "meta"), stacked(name).fsdp_extract_buffers(), strict=True)),
        "fsdp_post_all_gather": lambda: gathered(stacked(name)),
        "fsdp_pre_all_gather": lambda: dict.fromkeys(("mesh", "orig_size", "contiguous_orig_stride", "module", "mp_policy")),
        "of_stack": lambda: {"values": torch.zeros(2, 64, 128), "quantizer": quantizer_of(name)},
        "update_usage": lambda: {"rowwise_usage": True, "columnwise_usage": None},
    }


def grouped_calls() -> list[Right]:
    """Of every public method that takes an argument."""
    found = []
    for cls, name in GROUPED:
        arguments = _arguments(cls, name)
        for method in methods_of(cls):
            if method in arguments:
                found.append(Right(f"{name} {cls.__name__}", method, lambda cls=cls, name=name: grouped(cls, name), arguments[method]))
    for name in ("current", "block", "mxfp8", "nvfp4"):
        for method, given in _stack_arguments(name).items():
            found.append(Right(f"{name} GroupedTensor", method, lambda name=name: stacked(name), given))
    return found
