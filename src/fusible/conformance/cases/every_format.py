"""Records of the functions that take quantizers and tensors of every format: with one scale per tensor (``quantize``), or in blocks by the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fusible.conformance import block_oracle as oracle
from fusible.conformance.cases.block_quantize import framed, quantized, transforming
from fusible.conformance.cases.block_tensors import BLOCKED, WAYS, BlockQuantizer, copies, in_tiles, stored
from fusible.conformance.cases.quantize import bgrad_per_tensor, create_empty_per_tensor, dequantize_per_tensor, quantize_per_tensor
from fusible.conformance.table import Arguments, Disagreement, Output, Sample, random, record
from fusible.quantized import Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from fusible.tex import DType
from fusible.tex.formats import NVFP4

__all__ = []

_E4M3, _E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
_SHAPE = (32, 64)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""The non-negative numbers of E2M1."""


def _chosen(dtype: torch.dtype) -> Iterator[tuple[str, BlockQuantizer]]:
    yield from ((name, make()) for name, make in BLOCKED.items())
    for way in WAYS:
        yield from ((f"{name} {way}", BLOCKED[name](rowwise=way == "rowwise", columnwise=way != "rowwise")) for name in ("mxfp8", "block 1x128"))
    yield "mxfp8 of tiles", MXFP8Quantizer(_E4M3, with_2d_quantization=True)
    yield "nvfp4 of tiles", NVFP4Quantizer(with_2d_quantization=True)
    yield "blocks of at least an amax", Float8BlockQuantizer(_E4M3, amax_epsilon=50.0, block_scaling_dim=1)
    if dtype is torch.bfloat16:
        yield "nvfp4 transformed", transforming()


def with_zeros(generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers, and blocks of zeros in both directions."""
    x = random(generator, _SHAPE, dtype, 30.0)
    x[1], x[:, 5] = 0, 0
    return x


@record("quantize")
def quantize(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    yield from quantize_per_tensor(generator, dtype)
    for label, quantizer in _chosen(dtype):
        if label == "nvfp4 transformed":  # whose sums are exact
            x = torch.randint(-60, 61, _SHAPE, generator=generator).to(dtype)
        else:
            x = with_zeros(generator, dtype)
        yield Sample(label, {"tensor": x, "quantizer": quantizer}, tuple(quantized("result", x, quantizer)))
    for name, noop in itertools.product(("mxfp8", "block 1x128", "nvfp4"), (None, 0.0, 1.0)):
        x = random(generator, _SHAPE, dtype, 30.0)
        output, _ = stored(name, _SHAPE, dtype, 5)
        tensors = [name for name, value in vars(output).items() if isinstance(value, torch.Tensor)]
        kept = [Output(f"output.{name}", getattr(output, name).clone()) for name in tensors]
        flag = None if noop is None else torch.tensor([noop])
        arguments = {"tensor": x, "quantizer": BLOCKED[name](), "output": output, "noop": flag}
        outputs = kept if noop == 1.0 else quantized("output", x, arguments["quantizer"])
        yield Sample(f"into {name}, noop {noop}", arguments, tuple(outputs), ("output",))

    x, quantizer, outputs = swizzled(generator, dtype, "result")
    yield Sample("mxfp8 in tiles", {"tensor": x, "quantizer": quantizer}, outputs)
    yield rounded_by_chance(generator, dtype)


def swizzled(generator: torch.Generator, dtype: torch.dtype, at: str) -> tuple[torch.Tensor, MXFP8Quantizer, tuple[Output, ...]]:
    """A tensor, a quantizer that orders scales as tensor cores read them, and the outputs at ``at``."""
    x, quantizer = random(generator, (128, 128), dtype, 30.0), MXFP8Quantizer(_E4M3)
    quantizer.optimize_for_gemm = True
    outputs = [Output(f"{at}._with_gemm_swizzled_scales", True)]
    for way, copy in copies(x, quantizer):
        outputs.append(Output(f"{at}._{way}_data", copy.data))
        outputs.append(Output(f"{at}._{way}_scale_inv", in_tiles(copy.scales, way == "columnwise")))
    return x, quantizer, tuple(outputs)


def rounded_by_chance(generator: torch.Generator, dtype: torch.dtype) -> Sample:
    """NVFP4 with stochastic rounding: the nearer an element is to the number above, the more likely it is rounded up."""
    x = (torch.randn(_SHAPE, generator=generator) * 3).to(dtype)
    lines = x.float().numpy()
    amax = np.abs(lines).max().reshape(1)
    _, scales = oracle.nvfp4(lines, amax, False)
    scale = oracle.tensor_scale(amax)
    encoding = np.float32(1) / (scales.view(oracle.E4M3).astype(np.float32) * (np.float32(1) / scale))
    places = np.clip(np.abs(lines) * encoding.repeat(16, 1), 0, 6)
    upper = np.minimum(np.searchsorted(_E2M1, places), len(_E2M1) - 1)
    lower = np.maximum(upper - 1, 0)
    chance = (places - _E2M1[lower]) / np.maximum(_E2M1[upper] - _E2M1[lower], 0.5)

    def by_chance(result: Any, arguments: Arguments) -> torch.Tensor:
        """The bytes of the result, if each element became one of its two neighbours and as many were rounded up as is likely."""
        pairs = result._rowwise_data.cpu()
        values = oracle.e2m1_values(torch.stack((pairs & 15, pairs >> 4), -1).view(_SHAPE).numpy())
        up = np.abs(values) == _E2M1[upper]
        if not (up | (np.abs(values) == _E2M1[lower])).all() or (values * lines < 0).any():
            raise Disagreement("a number that is not beside the element")
        deviation = (chance * (1 - chance)).sum() ** 0.5
        if abs(up.sum() - chance.sum()) >= 6 * deviation:
            raise Disagreement(f"{up.sum()} elements are rounded up instead of about {chance.sum():.0f}")
        far = np.minimum(chance, 1 - chance).sum()
        if (up != (chance > 0.5)).sum() < far - 6 * deviation:
            raise Disagreement(f"elements are rounded to nearest instead of {far:.0f} times to the other number")
        return pairs

    quantizer = NVFP4Quantizer(stochastic_rounding=True, columnwise=False)
    shape = NVFP4.scale_shape(_SHAPE, False, NVFP4.is_tiled(quantizer))
    outputs = (Output("result._rowwise_data", by_chance), framed("result._rowwise_scale_inv", torch.from_numpy(scales), shape))
    return Sample("nvfp4 rounded by chance", {"tensor": x, "quantizer": quantizer}, outputs)


@record("bgrad_quantize")
def bgrad_quantize(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    yield from bgrad_per_tensor(generator, dtype)
    for name in ("mxfp8", "block 1x128", "nvfp4"):
        x, quantizer = with_zeros(generator, dtype), BLOCKED[name]()
        summed = Output(0, x.double().sum(0), dtype, len(x), x.double().abs().sum(0).max().item())
        yield Sample(name, {"input": x, "quantizer": quantizer}, (summed, *quantized("result.1", x, quantizer)))
    x, quantizer, outputs = swizzled(generator, dtype, "result.1")
    yield Sample("mxfp8 in tiles", {"input": x, "quantizer": quantizer}, outputs)
    x = random(generator, _SHAPE, dtype, 3.0)
    summed = Output(0, x.double().sum(0), dtype, len(x), x.double().abs().sum(0).max().item())
    yield Sample("no quantizer", {"input": x, "quantizer": None}, (summed, Output(1, x.clone())))


@record("dequantize")
def dequantize(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    yield from dequantize_per_tensor(generator, dtype)
    for name, ways in itertools.product(BLOCKED, (WAYS, *((way,) for way in WAYS))):
        x, values = stored(name, (64, 160), torch.bfloat16, 3, ways)
        value = values[ways[0]]
        yield Sample(f"{name} {ways}", {"input": x, "otype": dtype}, (Output(None, value, dtype),))


@record("create_empty_quantized_tensor", dtypes=(torch.bfloat16,))
def create_empty(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    yield from create_empty_per_tensor(generator, dtype)
    for name, make in BLOCKED.items():
        like, _ = stored(name, (64, 160), dtype, 3)
        arguments = {"quantizer": make(), "shape": [64, 160], "dtype": dtype, "device": torch.device("cpu"), "pin_memory": False}
        tensors = [(name, value) for name, value in vars(like).items() if isinstance(value, torch.Tensor)]
        outputs = [Output(f"result.{name}.shape", value.shape) for name, value in tensors]
        outputs += [Output(f"result.{name}.dtype", value.dtype) for name, value in tensors]
        yield Sample(f"{name} of [64, 160]", arguments, (*outputs, Output("result._dtype", dtype)))
    arguments = {"quantizer": None, "shape": [3, 5], "dtype": dtype, "device": torch.device("cpu"), "pin_memory": False}
    yield Sample("no quantizer", arguments, (Output("result.shape", torch.Size([3, 5])), Output("result.dtype", dtype)))
