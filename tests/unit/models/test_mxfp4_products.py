"""Products that read MXFP4 weights as they lie, eager and compiled, beside their values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fusible
from fusible import cpp_extensions, tex
from fusible.models.checkpoints import MXFP4WeightQuantizer
from fusible.models.weight_formats import WEIGHT_FORMATS
from fusible.pytorch import quantize_parameters
from fusible.tex import DType

pytestmark = pytest.mark.skipif(not cpp_extensions.available, reason="the native kernels are not built")


def product(weight: Any, x: torch.Tensor) -> torch.Tensor:
    workspace = torch.empty(0)
    result, *_ = tex.generic_gemm(
        weight, True, x, False, None, None, DType.kBFloat16, None, DType.kBFloat16, False, None, False, workspace, 0, False, False
    )
    return result


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_compiled_kernels_read_codes_and_scales(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = MXFP4WeightQuantizer()(torch.randn(70, 96, generator=generator) * torch.logspace(-6, 6, 96))
    x = torch.randn(rows, 96, generator=generator).bfloat16()
    with tex.record() as calls:
        found = product(weight, x)
    assert [(call.function, call.backend) for call in calls] == [("generic_gemm", "cpu")]
    values = weight.dequantize(dtype=torch.float32).double()
    wanted, size = x.double() @ values.t(), x.double().abs() @ values.abs().t()
    assert ((found.double() - wanted).abs() <= size * (96 * 2.0**-23) + wanted.abs() * 2.0**-8).all()


def test_a_weight_is_not_decoded_for_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = MXFP4WeightQuantizer()(torch.randn(64, 64)), torch.randn(2, 64).bfloat16()
    wanted = product(weight, x)

    def refused(*_: Any) -> None:
        raise AssertionError("decoded")

    form = tex.formats.format_of(weight)
    monkeypatch.setitem(form.codecs, "torch", form.codecs["torch"]._replace(decode=refused))
    assert torch.equal(product(weight, x), wanted)


def test_programs_call_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = fusible.Sequential(fusible.RMSNorm(128), fusible.Linear(128, 256, bias=False)).requires_grad_(False).bfloat16()
    quantize_parameters(model, recipe=WEIGHT_FORMATS["mxfp4"])
    x = torch.randn(3, 128).bfloat16()
    eager = model(x)
    form = tex.formats.format_of(model[1].weight)

    def refused(*_: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setitem(form.codecs, "lazy", form.codecs["lazy"]._replace(decode=refused))
    model.compile("xla")
    torch.testing.assert_close(model(x), eager, rtol=2.0**-7, atol=2.0**-7)
