"""Records of the casts to and from 8 bits, byte for byte by ml_dtypes, and of the amaxes and scales of scaling recipes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fusible.conformance import block_oracle as oracle
from fusible.conformance.eight_bits import FORMATS, cast, decoded
from fusible.conformance.quantized import PerTensorQuantizer
from fusible.conformance.table import Output, Sample, random, record, strided
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Quantizer, Float8TensorStorage
from fusible.tex import DType
from fusible.tex.protocol import FLT_MAX, FP8_MAX

__all__ = [
    "FORMER",
    "amax_of",
    "bgrad_per_tensor",
    "create_empty_per_tensor",
    "dequantize_per_tensor",
    "quantize_per_tensor",
    "quantized_per_tensor",
    "scale_of",
    "with_former",
]

_SHAPES = ((4, 6), (2, 3, 5), (7,), (0, 4), (3, 1401))


def scale_of(x: Tensor, fp8: DType, power_of_two: bool, least: float = 0.0) -> float:
    """The scale that brings the largest element, or ``least``, to the format's largest; 1 for zeros, and the next lower power of two where one is
    asked for."""
    return oracle.fp8_scale(amax_of(x).numpy(), fp8, least, power_of_two, FLT_MAX).item()


def amax_of(x: Tensor) -> Tensor:
    """The largest absolute value, ``[1]``; 0 of nothing."""
    return x.float().abs().max()[None] if x.numel() else torch.zeros(1)


FORMER = 20.0
"""The amax of a quantizer before the call: more than that of some inputs, and less than that of others."""


def with_former(x: Tensor) -> Tensor:
    """The amax of a quantizer after ``x``: the larger of both."""
    return torch.maximum(amax_of(x), torch.tensor([FORMER]))


def inputs(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Tensor]:
    for shape in _SHAPES:
        yield random(generator, shape, dtype, 30.0)
    yield strided(generator, (6, 4, 10), dtype)


def quantized_per_tensor(at: str, x: Tensor, quantizer: PerTensorQuantizer, owner: str = "") -> list[Output]:
    """The outputs of quantizing ``x`` by one scale: the tensor at ``at``, and the amax of a quantizer of delayed scaling at ``owner``."""
    delayed = isinstance(quantizer, Float8Quantizer)
    scale = quantizer.scale.item() if delayed else scale_of(x, quantizer.dtype, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    data = cast(x, scale, quantizer.dtype)
    outputs = [Output(f"{at}._data", data), Output(f"{at}._transpose", data.movedim(-1, 0).contiguous())]
    outputs.append(Output(f"{at}._scale_inv", torch.tensor([scale]).double().reciprocal()))
    return outputs + ([Output(f"{owner}.amax", with_former(x))] if delayed and owner else [])


def quantizing(generator: torch.Generator, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, PerTensorQuantizer]]:
    """``(label, x, quantizer)``."""
    for x in inputs(generator, dtype):
        for fp8 in FORMATS:
            label = f"{list(x.shape)} {fp8.name}"
            yield f"{label} delayed", x, Float8Quantizer(torch.tensor([4.0]), torch.tensor([FORMER]), fp8)
            for power_of_two in (False, True):
                yield f"{label} current {power_of_two}", x, Float8CurrentScalingQuantizer(fp8, "cpu", force_pow_2_scales=power_of_two)
    x = random(generator, (4, 6), dtype)
    yield "an amax of at least 100", x, Float8CurrentScalingQuantizer(FORMATS[0], "cpu", amax_epsilon=100.0)


def quantize_per_tensor(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of ``quantize`` by one scale a tensor."""
    for label, x, quantizer in quantizing(generator, dtype):
        yield Sample(label, {"tensor": x, "quantizer": quantizer}, tuple(quantized_per_tensor("result", x, quantizer, "quantizer")))
    x = random(generator, (4, 6), dtype)
    for skip in (0, 1):
        quantizer = Float8Quantizer(torch.tensor([4.0]), torch.tensor([FORMER]), DType.kFloat8E4M3)
        old = torch.full((4, 6), 7, dtype=torch.uint8)
        output = Float8TensorStorage(
            data=old.clone(), fp8_scale_inv=torch.ones(1), fp8_dtype=DType.kFloat8E4M3, fake_dtype=dtype, quantizer=quantizer
        )
        data = old if skip else cast(x, 4.0, DType.kFloat8E4M3)
        inverse = Output("output._scale_inv", torch.tensor([1.0 if skip else 0.25]))
        outputs = (Output("output._data", data), inverse, Output("quantizer.amax", torch.tensor([FORMER]) if skip else with_former(x)))
        arguments = {"tensor": x, "quantizer": quantizer, "output": output, "noop": torch.tensor([float(skip)])}
        yield Sample(f"into an output, noop {skip}", arguments, outputs)


def bgrad_per_tensor(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of ``bgrad_quantize`` by one scale a tensor."""
    for label, x, quantizer in quantizing(generator, dtype):
        rows = x.double().reshape(-1, x.shape[-1])
        summed = Output(0, rows.sum(0), dtype, max(1, rows.shape[0]), rows.abs().sum(0).max().item())
        yield Sample(label, {"input": x, "quantizer": quantizer}, (summed, *quantized_per_tensor("result.1", x, quantizer, "quantizer")))
    # Which of its NaN bytes E5M2 uses is not defined; that the sum is NaN is.
    x = torch.tensor([[1.0, torch.nan], [2.0, 3.0]]).to(dtype)
    quantizer = Float8Quantizer(torch.tensor([4.0]), torch.tensor([FORMER]), DType.kFloat8E5M2)
    yield Sample("NaN", {"input": x, "quantizer": quantizer}, (Output(0, x.double().sum(0), dtype, 2, 8.0),), ("quantizer.amax",))


def dequantize_per_tensor(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of ``dequantize`` of every byte, by one scale a tensor."""
    every = torch.arange(17 * 273, dtype=torch.int32).to(torch.uint8).view(17, 273)
    for fp8 in FORMATS:
        quantizer = Float8Quantizer(torch.tensor([4.0]), torch.zeros(1), fp8)
        x = Float8TensorStorage(data=every.clone(), fp8_scale_inv=torch.tensor([0.3]), fp8_dtype=fp8, fake_dtype=dtype, quantizer=quantizer)
        value = decoded(every, fp8) * torch.tensor(0.3).double()
        yield Sample(fp8.name, {"input": x, "otype": dtype}, (Output(None, value, dtype),))


def create_empty_per_tensor(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Samples of ``create_empty_quantized_tensor`` by one scale a tensor."""
    quantizer = Float8Quantizer(torch.tensor([16.0]), torch.tensor([3.0]), DType.kFloat8E5M2)
    arguments = {"quantizer": quantizer, "shape": [2, 3, 4], "dtype": dtype, "device": torch.device("cpu"), "pin_memory": False}
    shapes = {"_data": (2, 3, 4), "_transpose": (4, 2, 3), "_scale_inv": (1,)}
    yield Sample("[2, 3, 4]", arguments, tuple(Output(f"result.{name}.shape", torch.Size(shape)) for name, shape in shapes.items()))


@record("fp8_transpose", dtypes=(torch.uint8,))
def fp8_transpose(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for shape in (*_SHAPES, (3, 0), (2, 3, 2, 4)):
        x = torch.randint(0, 256, shape, generator=generator, dtype=dtype)
        moved = x.movedim(-1, 0).contiguous()
        yield Sample(str(list(shape)), {"input": x, "dtype": DType.kFloat8E4M3, "out": None}, (Output(None, moved),))
        arguments = {"input": x, "dtype": DType.kFloat8E4M3, "out": torch.zeros_like(moved)}
        yield Sample(f"{list(shape)} given", arguments, (Output("out", moved),))


@record("compute_amax")
def compute_amax(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for x in inputs(generator, dtype):
        yield Sample(str(list(x.shape)), {"input": x, "amax": torch.tensor([1e9])}, (Output("amax", amax_of(x)),))


@record("fused_amax_and_scale_update_after_reduction", dtypes=(torch.float32,))
def scale_update(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    """Histories of three amaxes: with a new amax, with none (the last one is taken from the history), all zeros; NaN, infinite and large ones."""
    each = [
        # the new amax, its history, the moved one, the scale before, the amaxes of the window and of the newest: None where the scale stays
        (5.0, (2.0, 8.0, 0.5), (0.0, 0.5, 5.0), 1.5, 8.0, 5.0), (0.0, (4.0, 1.0, 3.0), (0.0, 3.0, 4.0), 2.5, 4.0, 4.0),
        (0.0, (0.0, 0.0, 0.0), (0.0, 0.0, 0.0), -3.5, None, None), (torch.nan, (2.0, 3.0, 1.0), (0.0, 1.0, torch.nan), 1.25, None, None),
        (torch.inf, (2.0, 3.0, 1.0), (0.0, 1.0, torch.inf), 0.75, None, None), (3e5, (2.0, 3.0, 1.0), (0.0, 1.0, 3e5), 0.5, 3e5, 3e5),
        (1.0, (2.0, 0.5, 0.25), (0.0, 0.25, 1.0), 2.0, 1.0, 1.0), (0.0, (0.0, 5.0, 2.0), (0.0, 5.0, 2.0), 0.875, None, None),
    ]  # fmt: skip
    columns = [torch.tensor([row[i] for row in each]) for i in (0, 1, 2, 3)]
    cases = [(algorithm, fp8, margin, 1) for algorithm in ("max", "most_recent") for fp8 in FORMATS for margin in (2, 0)]
    for algorithm, fp8, margin, times in (*cases, ("max", FORMATS[0], 1, 700), ("max", FORMATS[0], 1, 0)):
        buffer, history, moved, scales = (
            x.t().contiguous().repeat_interleave(times, -1) if x.dim() > 1 else x.repeat_interleave(times) for x in columns
        )
        new = [row[4 if algorithm == "max" else 5] for row in each]
        wanted = [
            row[3] if amax is None else float(np.float32(FP8_MAX[fp8] / 2**margin) / np.float32(amax)) for row, amax in zip(each, new, strict=True)
        ]
        arguments = {
            "amax_reduction_buffer": buffer, "amax_histories": [history], "scales": [scales], "amax_compute_algo": algorithm, "fp8_dtype": fp8,
            "margin": margin,
        }  # fmt: skip
        outputs = (Output("amax_histories.0", moved), Output("scales.0", torch.tensor(wanted).repeat_interleave(times)))
        yield Sample(f"{algorithm} {fp8.name} {margin}, {times} times", arguments, outputs)
