"""Records of quantizing several tensors at once, and of NVFP4 with known amaxes: bytes and scales by the oracle of block-scaled formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fusible.conformance.cases.block_tensors import WAYS, BlockQuantizer, copies
from fusible.conformance.cases.quantize import FORMER, quantized_per_tensor
from fusible.conformance.quantized import PerTensorQuantizer
from fusible.conformance.table import FLOATS, Arguments, Output, Sample, random, record
from fusible.quantized import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer, MXFP8Quantizer, NVFP4Quantizer
from fusible.tex import DType
from fusible.tex.formats import block_format_of

__all__ = ["framed", "quantized", "transforming"]

_E4M3, _E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
_MAKERS: tuple[Callable[[], PerTensorQuantizer | BlockQuantizer | None], ...] = (
    lambda: None,
    lambda: Float8Quantizer(torch.tensor([4.0]), torch.tensor([FORMER]), _E4M3),
    lambda: Float8CurrentScalingQuantizer(_E5M2, "cpu"),
    lambda: Float8BlockQuantizer(_E4M3, block_scaling_dim=1),
    lambda: Float8BlockQuantizer(_E5M2, block_scaling_dim=2, force_pow_2_scales=False),
    lambda: Float8BlockQuantizer(_E4M3, block_scaling_dim=2, columnwise=False),
    lambda: MXFP8Quantizer(_E4M3),
    lambda: MXFP8Quantizer(_E5M2, with_2d_quantization=True, rowwise=False),
    lambda: NVFP4Quantizer(),
    lambda: NVFP4Quantizer(with_2d_quantization=True),
    lambda: NVFP4Quantizer(row_scaled_nvfp4=True),
    lambda: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="MSE", nvfp4_e4m3_max=256),
)

_LARGE, _MORE = (*_MAKERS[:4], _MAKERS[6]), (32, 144)
"""The makers of quantizers that get more than 4,096 elements, and the shape of NVFP4's input, which has not many more."""


def transforming(signs: bool = True) -> NVFP4Quantizer:
    """A quantizer with the random Hadamard transform, which takes bfloat16 alone."""
    return NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, with_random_sign_mask=signs)


def framed(at: str, wanted: Tensor, shape: Sequence[int]) -> Output:
    """Scales in the upper left of a buffer of ``shape``, whose rest may hold anything."""

    def frame(result: Any, arguments: Arguments) -> Any:
        found = Output(at, None).find(result, arguments)
        if not isinstance(found, Tensor) or tuple(found.shape) != tuple(shape):
            return torch.zeros(shape)
        whole = found.detach().cpu().clone()
        whole[: wanted.shape[0], : wanted.shape[1]] = wanted.to(whole.dtype)
        return whole

    return Output(at, frame)


def copies_at(at: str, x: Tensor, quantizer: BlockQuantizer, amaxes: dict[str, Tensor] | None = None) -> list[Output]:
    """The copies of ``x [M, K]`` in a block-scaled format, in NVFP4 with their own amaxes or those given."""
    outputs, made = [], dict(copies(x, quantizer, amaxes))
    four_bits, form = isinstance(quantizer, NVFP4Quantizer), block_format_of(quantizer)
    for way in WAYS:
        data, scale_inv, amax = f"{at}._{way}_data", f"{at}._{way}_scale_inv", f"{at}._amax_{way}"
        if way not in made:
            outputs += [Output(name, None) for name in ((data, scale_inv, amax) if four_bits else (data,))]
            continue
        shape = form.scale_shape(x.shape, way == "columnwise", form.is_tiled(quantizer))
        outputs += [Output(data, made[way].data), framed(scale_inv, made[way].scales, shape)]
        outputs += [Output(amax, made[way].amax)] if four_bits else []
    return outputs


def quantized(at: str, x: Tensor, quantizer: PerTensorQuantizer | BlockQuantizer | None, owner: str = "") -> list[Output]:
    """The outputs of quantizing ``x``: the tensor at ``at``, and the amax of the quantizer at ``owner``."""
    if quantizer is None:
        return [Output(at, x.clone())]
    common = [Output(f"{at}._dtype", x.dtype), Output(f"{at}.shape", x.shape)]
    if isinstance(quantizer, Float8Quantizer | Float8CurrentScalingQuantizer):
        return [*common, *quantized_per_tensor(at, x, quantizer, owner)]
    return [*common, *copies_at(at, x.reshape(-1, x.shape[-1]), quantizer)]


def integers(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Values whose Hadamard transform is exact."""
    return torch.randint(-60, 61, shape, generator=generator).to(dtype)


@record("multi_tensor_quantize")
def multi_quantize(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    makers = [*_MAKERS, *([transforming] if dtype is torch.bfloat16 else [])]
    shapes = [(64, 160) if make in _LARGE else _MORE if make is _MAKERS[8] else (32, 96) for make in makers]
    list_of = [
        integers(generator, shape, dtype) if make is transforming else random(generator, shape, dtype, 30.0)
        for make, shape in zip(makers, shapes, strict=True)
    ]
    chosen = [make() for make in makers]
    outputs = [part for i, pair in enumerate(zip(list_of, chosen, strict=True)) for part in quantized(f"result.{i}", *pair, f"quantizer_list.{i}")]
    yield Sample("every format", {"tensor_list": list_of, "quantizer_list": chosen}, tuple(outputs))
    x = random(generator, (16, 4, 32), dtype)
    chosen = [MXFP8Quantizer(_E4M3, columnwise=False), Float8BlockQuantizer(_E4M3, columnwise=False, block_scaling_dim=1)]
    for quantizer in chosen:
        ((_, copy),) = copies(x.view(64, 32), quantizer)
        outputs = (Output("result.0._rowwise_data", copy.data.view(x.shape)), Output("result.0.shape", x.shape))
        yield Sample(f"rows of three dimensions, {type(quantizer).__name__}", {"tensor_list": [x], "quantizer_list": [quantizer]}, outputs)
    yield Sample("none", {"tensor_list": [], "quantizer_list": []}, (Output(None, []),))


@record("split_quantize")
def split_quantize(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    for separate in (False, True):
        for makers, sections in (
            (_MAKERS[:3], [3, 5, 1]),
            ((_MAKERS[6], _MAKERS[6], _MAKERS[0]), [32, 64, 32]),
            ((_MAKERS[8],) * 2, [32, 16]),
            (_MAKERS[1:2], [70]),
        ):
            x, chosen = random(generator, (sum(sections) + 32, 64), dtype, 10.0), [make() for make in makers]
            parts = [x[sum(sections[:i]) : sum(sections[: i + 1])] for i in range(len(sections))]
            outputs = [
                part for i, pair in enumerate(zip(parts, chosen, strict=True)) for part in quantized(f"result.{i}", *pair, f"quantizer_list.{i}")
            ]
            arguments = {"tensor": x, "split_sections": sections, "quantizer_list": chosen, "disable_bulk_allocation": separate}
            yield Sample(f"{sections} separate {separate} {type(chosen[0]).__name__}", arguments, tuple(outputs))
    x, chosen = random(generator, (64, 64), dtype), [MXFP8Quantizer(_E4M3) for _ in range(2)]
    arguments = {"tensor": x, "split_sections": [0, 64], "quantizer_list": chosen}
    yield Sample("an empty part", arguments, (Output("result.0.shape", torch.Size([0, 64])), *quantized("result.1", x, chosen[1])))


@record("nvfp4_quantize_with_amax", dtypes=FLOATS)
def quantize_with_amax(generator: torch.Generator, dtype: torch.dtype) -> Iterator[Sample]:
    made = [{}, {"with_2d_quantization": True}, {"nvfp4_use_4over6": True}, {"columnwise": False}, {"rowwise": False}, {"row_scaled_nvfp4": True}]
    made.append({"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256})
    chosen = [(str(options), NVFP4Quantizer(**options)) for options in made]
    if dtype is torch.bfloat16:
        chosen += [(f"transform, signs {signs}", transforming(signs)) for signs in (True, False)]
    for label, quantizer in chosen:
        x = integers(generator, (32, 48), dtype) if quantizer.with_rht else random(generator, (32, 48), dtype, 3.0)
        sizes = (32, 48) if quantizer.row_scaled_nvfp4 else (1, 1)
        # Larger than the tensor's own, so that one that is computed shows.
        amaxes = {way: 250.0 + 100 * torch.rand(n, generator=generator) for way, n in zip(WAYS, sizes, strict=True)}
        asked = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
        known_amaxes = {f"{way}_amax": amax.clone() if asked[way] else None for way, amax in amaxes.items()}
        yield Sample(label, {"tensor": x, "quantizer": quantizer, **known_amaxes}, tuple(copies_at("result", x, quantizer, amaxes)))
