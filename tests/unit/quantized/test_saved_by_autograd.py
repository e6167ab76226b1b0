"""Quantized tensors among what an autograd function saves: taken apart into plain tensors, and put together again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusible.errors import ArgumentError
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    is_quantized_tensor,
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from fusible.tex import DType

E4M3 = DType.kFloat8E4M3
MAKE = [lambda: Float8CurrentScalingQuantizer(E4M3), lambda: Float8BlockQuantizer(E4M3), lambda: MXFP8Quantizer(E4M3), lambda: NVFP4Quantizer()]


def bare(quantizer: Quantizer) -> Any:
    quantizer.internal = True
    return quantizer(torch.randn(128, 128))


@pytest.mark.parametrize("make", MAKE)
def test_a_storage_comes_back_as_it_was(make: Any) -> None:
    first, second, plain, tensor = bare(make()), bare(make()), torch.randn(3), make()(torch.randn(128, 128))
    values = [first.dequantize(), second.dequantize()]
    saved, objects = prepare_for_saving(plain, first, None, second, tensor)
    assert all(entry is None or isinstance(entry, torch.Tensor) for entry in saved)
    assert objects == [None, first, None, second, None] and first.get_data_tensors() == (None, None)
    found = restore_from_saved(objects, saved)
    assert found[0] is plain and found[1] is first and found[2] is None and found[3] is second and found[4] is tensor
    assert [torch.equal(storage.dequantize(), value) for storage, value in zip((first, second), values, strict=True)] == [True, True]


def test_what_is_left_is_handed_back() -> None:
    saved, objects = prepare_for_saving(bare(MXFP8Quantizer(E4M3)), torch.zeros(1))
    more = [torch.ones(1), None]
    found, left = restore_from_saved(objects, [*saved, *more], return_saved_tensors=True)
    assert len(found) == 2 and left == more


def test_too_few_tensors_are_refused() -> None:
    with pytest.raises(ArgumentError, match="restore_from_saved: expected a plain tensor for each object, got 1"):
        restore_from_saved([None, None], [torch.zeros(1)])


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantizer: Any) -> torch.Tensor:
        saved, ctx.tensor_objects = prepare_for_saving(quantizer(x.detach()))
        ctx.save_for_backward(*saved)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = restore_from_func_ctx(ctx)
        assert ctx.tensor_objects is None
        return 2 * x.dequantize() * grads[0], None


def test_an_autograd_function_saves_and_finds_it() -> None:
    quantizer = Float8CurrentScalingQuantizer(E4M3)
    quantizer.internal = True
    x = torch.randn(16, 16, requires_grad=True)
    _Square.apply(x, quantizer).sum().backward()
    assert torch.equal(x.grad, 2 * quantizer(x.detach()).dequantize())  # type: ignore[arg-type]


@pytest.mark.parametrize("context", [SimpleNamespace(saved_tensors=()), SimpleNamespace(saved_tensors=(), tensor_objects=None)])
def test_a_context_without_objects_is_refused(context: Any) -> None:
    with pytest.raises(ArgumentError, match="the context of restore_from_func_ctx: expected tensor_objects, got none"):
        restore_from_func_ctx(context)


def test_what_is_quantized_is_told() -> None:
    quantizer = MXFP8Quantizer(E4M3)
    assert is_quantized_tensor(quantizer(torch.zeros(32, 32))) and is_quantized_tensor(bare(quantizer))
    assert not is_quantized_tensor(torch.zeros(1)) and not is_quantized_tensor(None)
