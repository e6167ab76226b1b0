"""Checks of quantized outputs: they are within half a step of the 8-bit format of the float64 values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch

from fusible import tex
from fusible.conformance.eight_bits import FORMATS, HALF_STEP
from fusible.conformance.nothing import compare_with_reference
from fusible.conformance.table import Disagreement, Output, Sample, close
from fusible.errors import NotServedError
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Quantizer, Float8TensorStorage
from fusible.tex import DType
from fusible.tex.protocol import FP8_MAX

__all__ = ["FORMATS", "PerTensorQuantizer", "check_quantized", "check_scalars", "quantizers", "scalar_quantizer"]

_SMALLEST = {DType.kFloat8E4M3: 2.0**-10, DType.kFloat8E5M2: 2.0**-17}

PerTensorQuantizer = Float8Quantizer | Float8CurrentScalingQuantizer

_FORMER = 3.0
"""The amax of a quantizer before the call. It stays where it is the larger one."""


def quantizers(fp8: DType) -> tuple[PerTensorQuantizer, ...]:
    """One of each scaling: delayed, current."""
    return Float8Quantizer(torch.tensor([16.0]), torch.tensor([_FORMER]), fp8), Float8CurrentScalingQuantizer(fp8, "cpu")


def scalar_quantizer(fp8: DType) -> PerTensorQuantizer:
    """A quantizer of delayed scaling whose scale and amax are 0-d tensors."""
    return Float8Quantizer(torch.tensor(16.0), torch.tensor(_FORMER), fp8)


def check_scalars(function: str, call: Callable[..., Any], reference: Callable[..., Any], samples: list[Sample]) -> None:
    """Raise ``Disagreement`` unless the first of ``samples`` with a quantizer of delayed scaling comes out as from the reference where scales and
    amaxes have no dimension; a call that the reference refuses is none."""
    sample = next((sample for sample in samples if any(True for _ in _delayed(sample.arguments))), None)
    if sample is None:
        return
    for quantizer in _delayed(sample.arguments):
        quantizer.scale, quantizer.amax = quantizer.scale.view(()), quantizer.amax.view(())
    again = deepcopy(sample.arguments)
    try:
        theirs = reference(**again)
    except Exception:
        return
    try:
        result = call(function, **sample.arguments)
    except NotServedError:
        return
    compare_with_reference(f"{sample.label} with scales without a dimension", sample.outputs, (result, sample.arguments), (theirs, again))


def _delayed(arguments: dict[str, Any]) -> Iterator[Float8Quantizer]:
    for value in arguments.values():
        for x in value if isinstance(value, list | tuple) else [value]:
            if isinstance(x, Float8Quantizer) and x.amax is not None:
                yield x


def check_quantized(call: Callable[..., Any], function: str, sample: Sample, quantizer: PerTensorQuantizer) -> None:
    """Raise ``Disagreement`` unless ``call(function, **arguments)``, with ``quantizer`` among them, quantizes the sample's first output."""
    main = sample.outputs[0]
    plain = dict.fromkeys(path.split(".")[0] for path in sample.written)  # outputs given to be written are not of the quantizer's format
    arguments = {**sample.arguments, **plain, "quantizer": quantizer}
    quantized = main.find(call(function, **arguments), arguments)
    if quantized._dtype is not main.dtype:
        raise Disagreement(f"a nominal dtype of {quantized._dtype} instead of {main.dtype}")
    with tex.set_backend("torch"):
        value = tex.dequantize(quantized, DType.kFloat32)
    if value.numel():
        _check_values(main, quantized, value, quantizer)
    if not torch.equal(quantized._transpose, quantized._data.movedim(-1, 0)):
        raise Disagreement("the transposed data is not that of the data")


def _check_values(main: Output, quantized: Float8TensorStorage, value: torch.Tensor, quantizer: PerTensorQuantizer) -> None:
    reference, fp8 = main.reference, quantizer.dtype
    magnitude = max(1.0, main.magnitude or 1.0)
    # Half a step of the format, half a unit of the nominal dtype that may have been rounded to first, and the fp32 error of what came before.
    slack = torch.finfo(main.dtype).eps + 2 * (main.length + 16) * torch.finfo(torch.float32).eps * magnitude
    saturated = FP8_MAX[fp8] * quantized._scale_inv.item()
    wanted = reference.clamp(-saturated, saturated)
    error = (value.double() - wanted).abs()
    bound = (HALF_STEP[fp8] + slack) * wanted.abs() + _SMALLEST[fp8] * quantized._scale_inv.item() + slack
    if not (error <= bound).all():
        raise Disagreement(f"the largest error is {(error / bound).max().item():.3g} times its bound")
    if isinstance(quantizer, Float8Quantizer):
        largest = reference.abs().max().clamp(min=_FORMER)
        close(quantizer.amax.view(-1), largest[None], torch.float32, main.length, max(1.0, main.magnitude or largest.item()))
