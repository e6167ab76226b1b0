"""NVFP4: E2M1 in blocks of 16 with E4M3 scales, and an fp32 amax for the tensor or for each of its lines (NVIDIA 2025, arXiv:2509.25149).

A *line* is a row of the row-wise copy, a column of the column-wise one. The column-wise copy is that of the transposed tensor, or of its random
Hadamard transform.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from fusible.tex.backends.torch_backend.blocks import block_amax, scale_blocks_
from fusible.tex.backends.torch_backend.fp8 import tensor_amax
from fusible.tex.backends.torch_backend.number_formats import (
    E2M1_MAX,
    decode_e2m1,
    decode_e2m1_pairs,
    encode_e2m1,
    encode_e2m1_stochastically,
    pack_nibbles,
)
from fusible.tex.backends.torch_backend.nvfp4_scales import element_factor, global_scale
from fusible.tex.backends.torch_backend.random import uniform
from fusible.tex.calls.seeds import draw_seeds
from fusible.tex.formats import BlockCodec, Copy

__all__ = ["NVFP4_CODEC"]

_E4M3_MAX = 448.0


def _encode(
    x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool, amaxes: dict[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], Iterator[Copy]]:
    """``amaxes``, where given, are taken in the place of the matrix's own."""
    amaxes = _amaxes(x, quantizer, rowwise, columnwise) if amaxes is None else amaxes
    return {f"amax_{way}": amax for way, amax in amaxes.items()}, _copies(x, quantizer, amaxes)


def _amaxes(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool) -> dict[str, Tensor]:
    """``max |x|`` that each copy is scaled by, fp32 ``[1]`` or one per line; the largest of the reduction group where the quantizer asks for it."""
    amaxes = {}
    if rowwise or not quantizer.with_rht:
        amaxes["rowwise"] = _amax(x, 1, quantizer)
    if columnwise:
        if quantizer.with_rht:
            amaxes["columnwise"] = _amax(_column_source(x, quantizer), 1, quantizer)
        else:
            amaxes["columnwise"] = _amax(x, 0, quantizer) if quantizer.row_scaled_nvfp4 else amaxes["rowwise"].clone()
    asked = {way: amaxes[way] for way, wanted in (("rowwise", rowwise), ("columnwise", columnwise)) if wanted}
    if quantizer.with_amax_reduction:
        for amax in asked.values():
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=getattr(quantizer, "amax_reduction_group", None))
    return asked


def _amax(x: Tensor, across: int, quantizer: Any) -> Tensor:
    if not quantizer.row_scaled_nvfp4:
        return tensor_amax(x)
    return x.abs().amax(across).float() if x.shape[across] else x.new_zeros(x.shape[1 - across], dtype=torch.float32)


def _copies(x: Tensor, quantizer: Any, amaxes: dict[str, Tensor]) -> Iterator[Copy]:
    """Codes, two to a byte, and E4M3 scales of each copy that has an amax."""
    for way, amax in amaxes.items():
        source = x if way == "rowwise" else _column_source(x, quantizer)
        packed, scales = _cast(source, amax, quantizer)
        yield way, packed, scales.view(torch.uint8)


def _column_source(x: Tensor, quantizer: Any) -> Tensor:
    """``x`` transposed; where the quantizer asks for it, rounded to bfloat16 and transformed in groups of 16: a product in fp32, rounded again."""
    if not quantizer.with_rht:
        return x.t().contiguous()
    return _transformed(x.t().to(torch.bfloat16).float().contiguous(), quantizer.rht_matrix).to(torch.bfloat16)


def _transformed(x: Tensor, matrix: Tensor) -> Tensor:
    return torch.mm(x.view(-1, 16), matrix.to(x.device, torch.float32)).view(x.shape)


def _transform(x: Any, way: str) -> Tensor | None:
    """The matrix that the groups of 16 in a copy of the tensor ``x`` were multiplied by, or None."""
    quantizer = x._quantizer
    return quantizer.rht_matrix if way == "columnwise" and quantizer is not None and quantizer.with_rht else None


def _values(x: Any, way: str, scales: Tensor, shape: tuple[int, int], undo: bool) -> tuple[Tensor, Tensor]:
    lines = shape if way == "rowwise" else (shape[1], shape[0])
    values = decode_e2m1_pairs(getattr(x, f"_{way}_data").reshape(lines[0], lines[1] // 2))
    scale_blocks_(values, scales.view(torch.float8_e4m3fn).float(), (1, 16))
    matrix = _transform(x, way) if undo else None
    if matrix is not None:
        values = _transformed(values, matrix.t())
    amax = getattr(x, f"_amax_{way}")
    largest = E2M1_MAX * (x._nvfp4_e4m3_max if x._nvfp4_use_4over6 else _E4M3_MAX)
    return values if way == "rowwise" else values.t(), amax / torch.full_like(amax, largest)


def _cast(x: Tensor, amax: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """The codes of the lines ``x``, two to a byte, and the E4M3 scales of their blocks."""
    tiled, over6 = quantizer.with_2d_quantization, quantizer.nvfp4_use_4over6
    high = 16 if tiled else 1
    largest = block_amax(x, (high, 16))
    scale = global_scale(amax, quantizer.nvfp4_e4m3_max if over6 else _E4M3_MAX).view(-1, 1)
    if over6:
        return _four_over_six(x, amax.view(-1, 1), scale, largest, high, quantizer)
    scales = _e4m3(largest * (scale * (1 / E2M1_MAX)))
    factors = element_factor(scales.float(), scale)
    packed = torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.uint8, device=x.device)
    seed = draw_seeds(1, x.device) if quantizer.stochastic_rounding else None
    for part in _parts(x):
        lines = x[part].to(torch.float32, copy=True)
        random = uniform(seed, part.start * x.shape[1], lines.shape) if seed is not None else None
        packed[part] = pack_nibbles(_codes(lines, _of_blocks(factors, part, high), high, random))
    return packed, _lines(scales, high)


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


def _e4m3(x: Tensor) -> Tensor:
    return x.clamp_max(_E4M3_MAX).to(torch.float8_e4m3fn)


def _lines(scales: Tensor, high: int) -> Tensor:
    """One scale per line, of tiles that are ``high`` lines."""
    return scales if high == 1 else scales.view(torch.uint8).repeat_interleave(high, 0).view(scales.dtype)


def _four_over_six(x: Tensor, amax: Tensor, scale: Tensor, largest: Tensor, high: int, quantizer: Any) -> tuple[Tensor, Tensor]:
    """Each block with its amax mapped to 6 or, where the error is less, to 4 (Cook et al. 2025, arXiv:2512.02010)."""
    packed, scales = (torch.empty(x.shape[0], width, dtype=torch.uint8, device=x.device) for width in (x.shape[1] // 2, largest.shape[1]))
    for part in _parts(x):
        own, by = (value if value.shape[0] == 1 else value[part] for value in (amax, scale))
        codes, scales[part] = _better(x[part].float(), own, by, _of_blocks(largest, part, high), high, quantizer)
        packed[part] = pack_nibbles(codes)
    return packed, scales


def _better(x: Tensor, amax: Tensor, scale: Tensor, largest: Tensor, high: int, quantizer: Any) -> tuple[Tensor, Tensor]:
    """The codes and scales of the fp32 lines ``x``."""
    base = largest / torch.full_like(largest, E2M1_MAX) * scale
    candidates = []
    for stretch in (1.0, 1.5):
        scales = _e4m3(base * stretch)
        codes = _codes(x.clone(), element_factor(scales.float(), scale), high)
        scales = _lines(scales, high)
        candidates.append((codes, scales, _error(x, codes, scales.float(), amax, high, quantizer)))
    (six, scales_six, error_six), (four, scales_four, error_four) = candidates
    better = _lines(error_four < error_six, high)
    blocks = (*better.shape, 16)
    codes = torch.where(better[..., None], four.view(blocks), six.view(blocks)).view(x.shape)
    return codes, torch.where(better, scales_four.view(torch.uint8), scales_six.view(torch.uint8))


def _error(x: Tensor, codes: Tensor, scales: Tensor, amax: Tensor, high: int, quantizer: Any) -> Tensor:
    """The absolute or squared errors of each block, summed in the order of its elements, and of a tile's lines pairwise."""
    largest = torch.full_like(amax, E2M1_MAX * quantizer.nvfp4_e4m3_max)
    squared = quantizer.nvfp4_4over6_err_mode == "MSE"
    error = torch.zeros_like(scales)
    for place in range(16):
        value = (decode_e2m1(codes[:, place::16]) * scales).mul_(amax).div_(largest)
        difference = value.sub_(x[:, place::16])
        error += difference.square_() if squared else difference.abs_()
    while high > 1:
        high //= 2
        first, second = error.view(-1, 2, high, error.shape[1]).unbind(1)
        error = (first + second).view(-1, error.shape[1])
    return error


NVFP4_CODEC = BlockCodec(_encode, _values, _transform)
