"""Quantizers of the block-scaled formats. Attribute names are the protocol that every tex backend reads; arguments and defaults are NVIDIA's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusible import tex
from fusible.errors import ArgumentError, DTypeError, check_number, expected
from fusible.quantized.arguments import AnyTensor, SomeSizes
from fusible.quantized.block_storage import BlockScaledStorage
from fusible.quantized.quantizer import Quantizer, kind_of_quantizer
from fusible.quantized.saving import register_saved
from fusible.quantized.tensor import QuantizedTensor
from fusible.quantized.tensors import Float8BlockwiseQTensor, MXFP8Tensor, NVFP4Tensor
from fusible.tex import DType
from fusible.tex.formats import FLOAT8_BLOCKS_SCHEME, MXFP8_SCHEME, NVFP4_SCHEME, block_format_of, format_of
from fusible.tex.protocol import fp8_format, outer, transposed_shape

__all__ = ["BlockScalingQuantizer", "Float8BlockQuantizer", "MXFP8Quantizer", "NVFP4Quantizer", "register_block_format", "rht_matrix"]

_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


class BlockScalingQuantizer(Quantizer):
    """Base of the quantizers with one scale per block; what each format computes is told in ``tex``'s interface."""

    dtype: DType

    def get_scale_shape(self, shape: SomeSizes, columnwise: bool) -> tuple[int, int]:
        """The shape of the scales of a copy of a tensor of ``shape``, padding included."""
        form = block_format_of(self)
        return form.scale_shape(tuple(shape), columnwise, form.is_tiled(self))

    def get_columnwise_shape(self, shape: SomeSizes) -> tuple[int, ...]:
        """The shape of column-wise data of a tensor of ``shape``, before NVFP4's elements are packed."""
        return transposed_shape(tuple(shape)) if block_format_of(self).transposed else tuple(shape)

    def is_quantizable(self, inp: AnyTensor) -> bool:
        """Whether ``inp`` is a matrix of whole blocks in both directions."""
        length, shape = block_format_of(self).length, tuple(inp.shape)
        return len(shape) >= 2 and not shape[-1] % length and not outer(shape) % length

    def is_requantization_safe(self) -> bool:
        return True


class Float8BlockQuantizer(BlockScalingQuantizer):
    """FP8 with fp32 scales, one per 1x128 block (``block_scaling_dim`` 1) or 128x128 tile (2).

    Scales are rounded down to powers of two with ``force_pow_2_scales``; ``amax_epsilon`` is the least amax.
    """

    block_len = 128

    _SCHEME = FLOAT8_BLOCKS_SCHEME
    _RECIPE = "Float8BlockScaling"

    def __init__(
        self,
        fp8_dtype: int,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if block_scaling_dim not in (1, 2):
            raise ArgumentError(expected("1 or 2", of="block_scaling_dim", got=block_scaling_dim, do="pass 1 for 1x128 blocks, 2 for 128x128"))
        self.dtype = fp8_format(fp8_dtype)
        check_number(amax_epsilon, f"amax_epsilon of {type(self).__name__}", least=0)
        self.amax_epsilon = amax_epsilon
        self.force_pow_2_scales = force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim


class MXFP8Quantizer(BlockScalingQuantizer):
    """FP8 with a power of two per 32 elements, or per 32x32 tile with ``with_2d_quantization``."""

    _SCHEME = MXFP8_SCHEME
    _RECIPE = "MXFP8BlockScaling"

    def __init__(self, fp8_dtype: int, *, rowwise: bool = True, columnwise: bool = True, with_2d_quantization: bool = False) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp8_format(fp8_dtype)
        self.with_2d_quantization = with_2d_quantization


class NVFP4Quantizer(BlockScalingQuantizer):
    """E2M1 with an E4M3 scale per 16 elements (per 16x16 tile with ``with_2d_quantization``), and an fp32 amax.

    ``with_rht`` transforms the column-wise copy by a random Hadamard matrix, whose amax that copy then has (``with_post_rht_amax`` goes with it);
    ``stochastic_rounding`` rounds to a neighbour at random, without bias; ``row_scaled_nvfp4`` takes an amax per row; ``nvfp4_use_4over6`` maps a
    block's amax to 6 or to 4, whichever errs less by ``nvfp4_4over6_err_mode``, with scales up to ``nvfp4_e4m3_max``; ``with_amax_reduction`` takes
    the amax's maximum over ``amax_reduction_group``.
    """

    _SCHEME = NVFP4_SCHEME
    _RECIPE = "NVFP4BlockScaling"

    def __init__(
        self,
        fp4_dtype: int = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if int(fp4_dtype) != DType.kFloat4E2M1:
            raise DTypeError(expected("kFloat4E2M1", of="fp4_dtype", got=repr(fp4_dtype), do="pass that type"))
        e4m3_max = nvfp4_e4m3_max if nvfp4_use_4over6 else 448
        if e4m3_max not in (448, 256):
            raise ArgumentError(expected("448 or 256", of="nvfp4_e4m3_max", got=nvfp4_e4m3_max, do="pass one of the two"))
        if nvfp4_4over6_err_mode.upper() not in ("MAE", "MSE"):
            raise ArgumentError(expected("'MAE' or 'MSE'", of="nvfp4_4over6_err_mode", got=repr(nvfp4_4over6_err_mode), do="pass one of the two"))
        self.dtype = DType.kFloat4E2M1
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.with_rht = with_rht
        self.with_post_rht_amax = with_post_rht_amax
        self.with_2d_quantization = with_2d_quantization
        self.stochastic_rounding = stochastic_rounding
        self.row_scaled_nvfp4 = row_scaled_nvfp4
        self.nvfp4_use_4over6 = nvfp4_use_4over6
        self.nvfp4_e4m3_max = e4m3_max
        self.nvfp4_4over6_err_mode = nvfp4_4over6_err_mode.upper()
        self.rht_matrix_random_sign_mask_t = sum(1 << i for i, sign in enumerate(_SIGNS) if sign < 0) if with_random_sign_mask else 0
        self.rht_matrix = rht_matrix(with_random_sign_mask)

    @property
    def with_random_sign_mask(self) -> bool:
        """Whether the rows of the Hadamard matrix have the signs of the mask."""
        return self.rht_matrix_random_sign_mask_t != 0

    def is_quantizable(self, inp: AnyTensor) -> bool:
        return not self.row_scaled_nvfp4 and super().is_quantizable(inp)

    def is_requantization_safe(self) -> bool:
        return not self.stochastic_rounding

    @staticmethod
    def convert_shape_for_fp4(shape: SomeSizes) -> tuple[int, ...]:
        """``[..., 2 n] -> [..., n]``: the shape of packed elements."""
        return (*shape[:-1], shape[-1] // 2)


def rht_matrix(with_random_sign_mask: bool = True) -> torch.Tensor:
    """The orthonormal 16x16 matrix of the random Hadamard transform, bfloat16: entry ``(i, j)`` is ``sign_i * (-1)^popcount(i & j) / 4``."""
    signs = _SIGNS if with_random_sign_mask else (1,) * 16
    rows = [[sign * (-1) ** (i & j).bit_count() / 4 for j in range(16)] for i, sign in enumerate(signs)]
    # A constant, needed also where what is quantized is yet to be made.
    device = "cpu" if torch.get_default_device().type == "meta" else None
    return torch.tensor(rows, dtype=torch.bfloat16, device=device)


def _storage_kind(storage: BlockScaledStorage) -> tuple[Any, ...]:
    form = format_of(storage)
    data = form.buffer(storage)
    return form.name, data.device.type if isinstance(data, torch.Tensor) else "lazy", form.element(storage)


def _factory(tensor_class: type[QuantizedTensor]) -> Any:
    storage_class = tensor_class._STORAGE

    def make(quantizer: Any, *, shape: Sequence[int], dtype: torch.dtype, **fields: Any) -> Any:
        data = fields["rowwise_data"] if fields["rowwise_data"] is not None else fields["columnwise_data"]
        if quantizer.internal or not isinstance(data, torch.Tensor):
            return storage_class(**fields, quantizer=quantizer, fake_dtype=dtype)
        return tensor_class(tuple(shape), dtype, **fields, quantizer=quantizer)

    return make


def register_block_format(quantizer_class: type[BlockScalingQuantizer], tensor_class: type[QuantizedTensor]) -> None:
    """Let ``tex`` make tensors of ``tensor_class`` (``QuantizedTensor`` and a ``BlockScaledStorage``) by quantizers of ``quantizer_class``, and save
    all of them. Their format must have a codec for each framework that is to compute with it (``BlockFormat.codecs``)."""
    storage_class: Any = tensor_class._STORAGE
    tex.register_factory(quantizer_class, _factory(tensor_class))
    tex.register_kind(quantizer_class, kind_of_quantizer)
    tex.register_kind(storage_class, _storage_kind)
    tex.register_kind(tensor_class, _storage_kind)
    register_saved(quantizer_class, storage_class, tensor_class)


register_block_format(Float8BlockQuantizer, Float8BlockwiseQTensor)
register_block_format(MXFP8Quantizer, MXFP8Tensor)
register_block_format(NVFP4Quantizer, NVFP4Tensor)
