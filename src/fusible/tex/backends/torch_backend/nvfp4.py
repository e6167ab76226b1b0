"""NVFP4 in torch: the lines of a matrix, some at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fusible.tex.backends.torch_backend.arrays import TORCH
from fusible.tex.backends.torch_backend.blocks import block_amax, scale_blocks_
from fusible.tex.backends.torch_backend.fp8 import tensor_amax
from fusible.tex.backends.torch_backend.number_formats import (
    decode_e2m1,
    decode_e2m1_pairs,
    encode_e2m1,
    encode_e2m1_stochastically,
    pack_nibbles,
)
from fusible.tex.backends.torch_backend.nvfp4_scales import element_factor, global_scale
from fusible.tex.backends.torch_backend.random import uniform
from fusible.tex.calls.seeds import draw_seeds
from fusible.tex.formats import NVFP4QuantizerLike
from fusible.tex.formulas.number_formats import E2M1_MAX
from fusible.tex.formulas.nvfp4 import E4M3_MAX, Nvfp4

__all__ = ["NVFP4_CODEC"]


def _amax(x: Tensor, across: int, quantizer: NVFP4QuantizerLike) -> Tensor:
    if not quantizer.row_scaled_nvfp4:
        return tensor_amax(x)
    return x.abs().amax(across).float() if x.shape[across] else x.new_zeros(x.shape[1 - across], dtype=torch.float32)


def _transformed(x: Tensor, matrix: Tensor) -> Tensor:
    return torch.mm(x.float().contiguous().view(-1, 16), matrix.to(x.device, torch.float32)).view(x.shape)


def _some_at_a_time(function: Callable[[Tensor], Tensor], lines: Tensor) -> Tensor:
    found = torch.empty(lines.shape, dtype=torch.bfloat16, device=lines.device)
    for part in _parts(lines) if lines.numel() else ():
        found[part] = function(lines[part])
    return found


def _cast(way: str, x: Tensor, amax: Tensor, quantizer: NVFP4QuantizerLike, random: None) -> tuple[Tensor, Tensor]:
    tiled, over6 = quantizer.with_2d_quantization, quantizer.nvfp4_use_4over6
    high = 16 if tiled else 1
    largest = block_amax(x, (high, 16))
    scale = global_scale(amax, quantizer.nvfp4_e4m3_max if over6 else E4M3_MAX).view(-1, 1)
    if over6:
        return _four_over_six(x, amax.reshape(-1, 1), scale, largest, high, quantizer)
    scales = _NVFP4.e4m3(largest * (scale * (1 / E2M1_MAX)))
    factors = element_factor(_of_e4m3(scales), scale)
    packed = torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.uint8, device=x.device)
    seed = draw_seeds(1, x.device) if quantizer.stochastic_rounding else None
    for part in _parts(x):
        lines = x[part].to(torch.float32, copy=True)
        drawn = uniform(seed, part.start * x.shape[1], lines.shape) if seed is not None else None
        packed[part] = pack_nibbles(_codes(lines, _of_blocks(factors, part, high), high, drawn))
    return packed, scales


def _parts(x: Tensor) -> Iterator[slice]:
    """Some lines at a time, whole tiles, as encoding holds many values per element: an eighth of them, or the lines of 32 Ki elements if more."""
    lines = -(-max(x.shape[0] // 8, (1 << 15) // x.shape[1], 1) // 16) * 16
    for first in range(0, x.shape[0], lines):
        yield slice(first, first + lines)


def _of_blocks(numbers: Tensor, part: slice, high: int) -> Tensor:
    """Those of the blocks in the lines ``part``, which are tiles of ``high`` lines."""
    return numbers[part.start // high : part.stop // high]


def _codes(x: Tensor, factors: Tensor, high: int, random: Tensor | None = None) -> Tensor:
    """The E2M1 codes of the fp32 lines ``x``, which are overwritten, times the factor of each block; by ``random`` rounded stochastically."""
    scale_blocks_(x, factors, (high, 16))
    return encode_e2m1(x) if random is None else encode_e2m1_stochastically(x, random)


def _of_e4m3(scales: Tensor) -> Tensor:
    return scales.view(torch.float8_e4m3fn).float()


def _four_over_six(x: Tensor, amax: Tensor, scale: Tensor, largest: Tensor, high: int, quantizer: NVFP4QuantizerLike) -> tuple[Tensor, Tensor]:
    packed, scales = (torch.empty(x.shape[0], width, dtype=torch.uint8, device=x.device) for width in (x.shape[1] // 2, largest.shape[1]))
    for part in _parts(x):
        own, by = (value if value.shape[0] == 1 else value[part] for value in (amax, scale))
        codes, scales[part] = _better(x[part].float(), own, by, _of_blocks(largest, part, high), high, quantizer)
        packed[part] = pack_nibbles(codes)
    return packed, scales


def _better(x: Tensor, amax: Tensor, scale: Tensor, largest: Tensor, high: int, quantizer: NVFP4QuantizerLike) -> tuple[Tensor, Tensor]:
    """The codes and scales of the fp32 lines ``x``."""
    return _NVFP4.better(
        _over(largest, E2M1_MAX) * scale,
        lambda scales: _codes(x.clone(), element_factor(_of_e4m3(scales), scale), high),
        lambda codes, scales: _error(x, codes, scales, amax, quantizer),
        high,
    )


def _over(x: Tensor, divisor: float) -> Tensor:
    return x / torch.full_like(x, divisor)


def _error(x: Tensor, codes: Tensor, scales: Tensor, amax: Tensor, quantizer: NVFP4QuantizerLike) -> Tensor:
    """The absolute or squared errors of each block, summed in the order of its elements."""
    largest = torch.full_like(amax, E2M1_MAX * quantizer.nvfp4_e4m3_max)
    squared = quantizer.nvfp4_4over6_err_mode == "MSE"
    error = torch.zeros_like(scales)
    for place in range(16):
        value = (decode_e2m1(codes[:, place::16]) * scales).mul_(amax).div_(largest)
        difference = value.sub_(x[:, place::16])
        error += difference.square_() if squared else difference.abs_()
    return error


_NVFP4 = Nvfp4(
    arrays=TORCH,
    amax=_amax,
    cast=_cast,
    of_e4m3=_of_e4m3,
    codes=decode_e2m1_pairs,
    scaled=scale_blocks_,
    over=_over,
    hadamard=lambda quantizer: quantizer.rht_matrix,
    transformed=_transformed,
    some_at_a_time=_some_at_a_time,
)
NVFP4_CODEC = _NVFP4.codec()
