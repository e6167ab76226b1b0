"""A quantized tensor that is taken apart has all of its fields, whichever way its class is read, and is put together as a storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusible import tex
from fusible.models.checkpoints import MXFP4WeightQuantizer
from fusible.nvte import flatten_storage, unflatten_storage
from fusible.quantized import Float8BlockQuantizer, Float8CurrentScalingQuantizer, HybridQuantizer, MXFP8Quantizer, NVFP4Quantizer

E4M3 = tex.DType.kFloat8E4M3
QUANTIZERS: dict[str, Any] = {
    "FP8": lambda **ways: Float8CurrentScalingQuantizer(E4M3, **ways),
    "blocks": lambda **ways: Float8BlockQuantizer(E4M3, **ways),
    "MXFP8": lambda **ways: MXFP8Quantizer(E4M3, **ways),
    "NVFP4": lambda **ways: NVFP4Quantizer(**ways),
    "parts": lambda **ways: HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=Float8CurrentScalingQuantizer(E4M3)),
    "MXFP4": lambda **ways: MXFP4WeightQuantizer(),
}


@pytest.mark.parametrize("ways", [{"rowwise": True, "columnwise": True}, {"columnwise": False}], ids=["both", "rows"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_nothing_is_left_behind(name: str, ways: dict[str, bool]) -> None:
    tensor = QUANTIZERS[name](**ways)(torch.randn(128, 128))
    bare = tensor.storage_without_autograd()
    for held in (tensor, bare):
        leaves, spec = flatten_storage(held)
        again = unflatten_storage(iter(leaves), spec)
        assert type(again) is type(bare) and not isinstance(again, torch.Tensor)
        fields, wanted = again.get_metadata(), bare.get_metadata()
        assert fields.keys() == wanted.keys()
        assert torch.equal(again.dequantize(), bare.dequantize())
        for field, value in wanted.items():
            if isinstance(value, torch.Tensor) and not hasattr(value, "get_metadata"):
                assert fields[field] is value, field
            elif not hasattr(value, "get_metadata") and field != "quantizer":
                assert fields[field] == value, field
    assert len(flatten_storage(tensor)[0]) == len(flatten_storage(bare)[0])
