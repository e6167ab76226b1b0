"""``TensorSpec``: tensors taken apart into names, shapes and types, and put together again, without data on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusible.errors import ArgumentError
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    TensorSpec,
    to_tensor_spec,
)
from fusible.tex import DType

E4M3 = DType.kFloat8E4M3
QUANTIZERS = {
    "current": Float8CurrentScalingQuantizer(E4M3),
    "delayed": Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3, columnwise=False),
    "mxfp8": MXFP8Quantizer(E4M3),
    "block": Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "rows": Float8BlockQuantizer(E4M3, rowwise=True, columnwise=False, block_scaling_dim=1),
    "nvfp4": NVFP4Quantizer(),
}
SHAPES = [(128, 256), (2, 64, 128)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("internal", [False, True])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_spec_tells_what_the_quantizer_makes(name: str, internal: bool, shape: tuple[int, ...]) -> None:
    quantizer: Any = QUANTIZERS[name].copy()
    quantizer.internal = internal
    made = quantizer(torch.randn(shape))
    names, metadata = made.__tensor_flatten__()
    spec = to_tensor_spec(made)
    assert spec.is_quantized and spec.shape == shape and spec.dtype is torch.float32 and list(spec.inner_names()) == names
    specs = quantizer.inner_tensor_specs(shape)
    assert {each: (tuple(getattr(made, each).shape), getattr(made, each).dtype) for each in names} == specs
    told = spec.create_metadata()
    assert told.keys() == metadata.keys() and told["cls"] is type(made) and told["is_tensor"] is not internal
    assert told["nontensor_kwargs"].keys() == metadata["nontensor_kwargs"].keys()
    again = spec.assemble([getattr(made, each) for each in names])
    assert type(again) is type(made) and tuple(again.shape) == shape and torch.equal(again.dequantize(), made.dequantize())
    empty = spec.create_tensor()
    assert type(empty) is type(made) and tuple(empty.shape) == shape and empty.device.type == "cpu"
    assert quantizer.update_quantized(torch.ones(shape), empty) is not None and torch.equal(empty.dequantize(), torch.ones(shape))


def test_the_usage_of_a_spec_is_its_own() -> None:
    quantizer = QUANTIZERS["mxfp8"]
    spec = TensorSpec((64, 64), torch.bfloat16, quantizer, requires_grad=True)
    spec.update_usage(columnwise_usage=False)
    assert spec.inner_names() == ("_rowwise_data", "_rowwise_scale_inv") and quantizer.columnwise_usage
    made = spec.create_tensor()
    assert made.get_usages() == {"rowwise": True, "columnwise": False} and made.requires_grad and made.dtype is torch.bfloat16


def test_a_plain_tensor_has_one_inner_tensor() -> None:
    spec = to_tensor_spec(torch.zeros(2, 3, dtype=torch.float16, requires_grad=True))
    assert spec == TensorSpec((2, 3), torch.float16, None, True, torch.device("cpu")) and not spec.is_quantized
    assert spec.inner_names() == ("data",) and spec.create_metadata()["is_quantized"] is False
    made = spec.create_tensor()
    assert made.shape == (2, 3) and made.dtype is torch.float16 and made.requires_grad
    with pytest.raises(ArgumentError, match=r"^TensorSpec.update_usage: expected a quantized tensor's, got a plain one's; "):
        spec.update_usage(rowwise_usage=False)
    with pytest.raises(ArgumentError, match=r"^TensorSpec.assemble: expected one tensor each for data, got 2 tensors; "):
        spec.assemble([torch.zeros(1)] * 2)
