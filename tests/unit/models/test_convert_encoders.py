"""torch's own encoders: their layers are those that were converted, in inference, too, where torch has one call for all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fusible
from fusible import tex

WIDTH = 32
ACTIVATIONS: dict[str, Any] = {"relu": "relu", "gelu": "gelu", "a module": nn.GELU()}


def encoder(activation: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, activation=activation, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # of torch's one call
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_in_inference_the_layers_are_those_that_were_converted(activation: str, padded: bool) -> None:
    plain, x = encoder(ACTIVATIONS[activation]), torch.randn(2, 6, WIDTH)
    model = fusible.convert(copy.deepcopy(plain), fusible.Float8CurrentScaling(), keep_high_precision=())
    padding = torch.arange(6) >= torch.tensor([[6], [4]]) if padded else None
    with torch.no_grad(), tex.record() as calls:
        y, wanted = model(x, src_key_padding_mask=padding), plain(x, src_key_padding_mask=padding)
    assert sum(call.function == "generic_gemm" for call in calls) == 2 * 2
    seen = torch.ones(2, 6, dtype=torch.bool) if padding is None else ~padding
    assert 1e-3 < (y[seen] - wanted[seen]).norm() / wanted[seen].norm() < 0.1
    fusible.convert(model, undo=True)
    with torch.no_grad():
        assert torch.equal(model(x, src_key_padding_mask=padding), wanted)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]


def test_an_encoder_of_which_nothing_is_converted_stays_one_call() -> None:
    model = fusible.convert(nn.ModuleList([encoder("relu"), nn.Linear(WIDTH, WIDTH)]), exclude="0")
    assert type(model[0]) is nn.TransformerEncoder and model[0].use_nested_tensor and model[0].layers[0].activation_relu_or_gelu


def test_a_layer_that_nobody_calls_is_left_with_the_reason() -> None:
    model = fusible.convert(encoder("relu"), fusible.Float8CurrentScaling(), keep_high_precision=())
    left = {layer.name: layer.text for layer in fusible.conversion_report(model).left}
    assert left == dict.fromkeys(
        [f"layers.{i}.self_attn.out_proj" for i in range(2)], "torch's MultiheadAttention reads its weight, and does not call it"
    )
