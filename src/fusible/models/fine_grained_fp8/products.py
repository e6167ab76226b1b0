"""Products of an activation with weights that transformers' FP8 modules hold: what its kernels compute on a GPU, by Fusible's products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from fusible import tex
from fusible.models.fine_grained_fp8.weights import BlockSize, quantized_weight
from fusible.quantized import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    MXFP8Quantizer,
    MXFP8Tensor,
    QuantizedTensor,
)
from fusible.quantized.formats import FP8_MAX
from fusible.tex import DType
from fusible.tex.formats import MXFP8
from fusible.tex.protocol import to_dtype

__all__ = ["batched_product", "grouped_product", "product"]

_E4M3 = DType.kFloat8E4M3


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block_size: BlockSize,
    dtype: torch.dtype | None = None,
    activation_scale: torch.Tensor | None = None,
    *,
    quantize: bool = True,
) -> torch.Tensor:
    """``y [*, N] = x [*, K] @ weight.T`` in ``dtype``, x's where it is None; sums are in fp32. ``weight [N, K]`` and ``scale``: ``quantized_weight``.

    ``quantize``: x is quantized to E4M3, too. By ``activation_scale``, a number, where there is one: ``x / activation_scale``, saturated. Else by its
    own largest magnitudes: for each 1x128 (1x32 of a weight in MXFP8) of it, or for each of its rows where the weight has one scale. x alone has a
    gradient: ``dy`` times the weight's values. Raises ``NotServedError``.
    """
    made = x.dtype if dtype is None else dtype
    rows = x.reshape(-1, x.shape[-1])
    if torch.compiler.is_compiling():
        y = _compiled(rows, weight, scale, None if block_size is None else list(block_size), made, activation_scale, quantize)
    elif torch.is_grad_enabled() and rows.requires_grad:
        y = _Product.apply(rows, weight, scale, block_size, made, activation_scale, quantize)
    else:
        y = _product(rows, weight, scale, block_size, made, activation_scale, quantize)
    return y.view(*x.shape[:-1], weight.shape[0])  # type: ignore[union-attr]


def grouped_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    sizes: Sequence[int],
    block_size: BlockSize,
    *,
    activation_scales: torch.Tensor | None = None,
    quantize: bool = True,
) -> torch.Tensor:
    """``product`` of each group of the rows of ``x [tokens, K]`` with a weight of its own, ``weight [groups, N, K]``. ``sizes``: the rows of each
    group; of those behind all groups the result is 0. ``activation_scales [groups]``."""
    parts, begin = [], 0
    for group, size in enumerate(sizes):
        if size:
            activation_scale = None if activation_scales is None else activation_scales[group]
            parts.append(product(x[begin : begin + size], weight[group], scale[group], block_size, None, activation_scale, quantize=quantize))
        begin += size
    return torch.cat([*parts, x.new_zeros(len(x) - begin, weight.shape[1])])


def batched_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, chosen: torch.Tensor, block_size: BlockSize, *, quantize: bool = True
) -> torch.Tensor:
    """``product`` of each row of ``x [tokens, K]`` with that of ``weight [groups, N, K]`` which is ``chosen [tokens]`` for it; 0 where none is."""
    order = chosen.argsort(stable=True)
    sizes = chosen.clamp(max=len(weight)).bincount(minlength=len(weight) + 1).tolist()[:-1]
    y = grouped_product(x[order], weight, scale, sizes, block_size, quantize=quantize)
    return torch.empty_like(y).index_copy(0, order, y)


class _Product(torch.autograd.Function):
    """The product, and ``dx = dy @ weight`` by the weight's values, as transformers has it; weights and scales are frozen."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block_size: BlockSize, dtype: torch.dtype, *more: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.block_size, ctx.dtype = block_size, rows.dtype
        return _product(rows, weight, scale, block_size, dtype, *more)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        weight, scale = ctx.saved_tensors
        return _gradient(dy, weight, scale, ctx.block_size, ctx.dtype), *[None] * 6


def _gradient(dy: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block_size: BlockSize, dtype: torch.dtype) -> torch.Tensor:
    values = quantized_weight(weight, scale, block_size, dtype).dequantize(dtype=dtype)
    return dy.to(dtype) @ values


def _product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block_size: BlockSize,
    dtype: torch.dtype,
    activation_scale: torch.Tensor | None,
    quantize: bool,
) -> torch.Tensor:
    if not len(rows):
        return rows.new_empty(0, weight.shape[0], dtype=dtype)
    quantized = quantized_weight(weight, scale, block_size, rows.dtype)
    rows = rows.detach().contiguous()
    if not quantize:
        return _gemm(quantized, rows, dtype)
    if activation_scale is not None:
        return _gemm(quantized, _by_given_scale(rows, activation_scale), dtype)
    return _DYNAMIC[type(quantized)](quantized, rows, dtype)


@torch.library.custom_op("fusible::fine_grained_fp8_product", mutates_args=())
def _compiled(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    block_size: list[int] | None,
    dtype: torch.dtype,
    activation_scale: torch.Tensor | None,
    quantize: bool,
) -> torch.Tensor:
    """The product as one operation of a graph of ``torch.compile``."""
    return _product(rows, weight, scale, block_size, dtype, activation_scale, quantize)


@_compiled.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block_size: Any, dtype: torch.dtype, *more: Any) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0], dtype=dtype)


@torch.library.custom_op("fusible::fine_grained_fp8_gradient", mutates_args=())
def _compiled_gradient(dy: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block_size: list[int] | None, dtype: torch.dtype) -> torch.Tensor:
    return _gradient(dy, weight, scale, block_size, dtype)


@_compiled_gradient.register_fake
def _(dy: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block_size: Any, dtype: torch.dtype) -> torch.Tensor:
    return dy.new_empty(dy.shape[0], weight.shape[1], dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, weight, scale, block_size, *_ = inputs
    ctx.save_for_backward(weight, scale)
    ctx.block_size, ctx.dtype = block_size, rows.dtype


def _go_back(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    weight, scale = ctx.saved_tensors
    return _compiled_gradient(dy, weight, scale, ctx.block_size, ctx.dtype), *[None] * 6


_compiled.register_autograd(_go_back, setup_context=_keep)


_MANY_ROWS = 25
"""From here on a product of blocks with scales of fp32 is one of fp32, on a CPU several times as long as one of bf16."""


@cache
def _multiplies_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _gemm(weight: Any, rows: Any, dtype: torch.dtype) -> torch.Tensor:
    """Where x and y are bf16 and rows are many, values in blocks are rounded to bf16, as the dequantized model has them: y is rounded as much."""
    if dtype is rows.dtype is torch.bfloat16 and len(rows) >= _MANY_ROWS and isinstance(weight, Float8BlockwiseQTensor) and _multiplies_bf16():
        weight, rows = weight.dequantize(dtype=dtype), rows.dequantize(dtype=dtype) if isinstance(rows, QuantizedTensor) else rows
    return tex.generic_gemm(weight, True, rows, False, None, None, to_dtype(dtype), None, None, False, None, False, None, 0, False, True)[0]


def _by_given_scale(rows: torch.Tensor, scale: torch.Tensor) -> Any:
    inverse = scale.detach().float().reciprocal().reshape(1)
    return Float8Quantizer(inverse, torch.zeros_like(inverse), _E4M3, columnwise=False)(rows)


def _by_row(weight: Any, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A number for a row of x is one of the row of y, so that the product itself has one scale."""
    scale = (rows.float().abs().amax(1, keepdim=True) / FP8_MAX[_E4M3]).clamp_min(torch.finfo(torch.float32).tiny)
    data = (rows.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    whole: dict[str, Any] = {"data": data, "fp8_scale_inv": data.new_ones(1, dtype=torch.float32), "fp8_dtype": _E4M3, "quantizer": _as_is()}
    return (_gemm(weight, Float8Tensor(tuple(rows.shape), rows.dtype, **whole), torch.float32) * scale).to(dtype)


def _by_block(weight: Any, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _gemm(weight, _of_blocks(weight._quantizer.force_pow_2_scales)(rows), dtype)


def _by_short_block(weight: Any, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The format has whole blocks of rows alone. Of others the product takes the values, which bf16 and fp32 have exactly."""
    missing = -len(rows) % MXFP8.length
    if not missing:
        return _gemm(weight, _of_short_blocks()(rows), dtype)
    exact = torch.bfloat16 if rows.dtype is torch.bfloat16 else torch.float32
    filled = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    return _gemm(weight, _of_short_blocks()(filled).dequantize(dtype=exact)[: len(rows)], dtype)


_DYNAMIC: dict[type, Callable[[Any, torch.Tensor, torch.dtype], torch.Tensor]] = {
    Float8Tensor: _by_row,
    Float8BlockwiseQTensor: _by_block,
    MXFP8Tensor: _by_short_block,
}
"""By the class of a weight, the product with an activation that is quantized alike."""


@cache
def _as_is() -> Any:
    return Float8CurrentScalingQuantizer(_E4M3, columnwise=False)


@cache
def _of_blocks(powers: bool) -> Any:
    return Float8BlockQuantizer(_E4M3, columnwise=False, force_pow_2_scales=powers, block_scaling_dim=1)


@cache
def _of_short_blocks() -> Any:
    return MXFP8Quantizer(_E4M3, columnwise=False)
