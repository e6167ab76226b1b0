"""MXFP4 weights: E2M1 in blocks of 32 along a row, with a power of two each (OCP Microscaling Formats specification 1.0, 2023).

The format is one of checkpoints: its tensors have a row-wise copy alone. Where rows are contracted, products of the compiled kernels read it as it
lies; others take its values. It is made of what ``fusible.tex.formats`` and ``fusible.quantized`` offer to formats from outside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fusible import lazy
from fusible.errors import ArgumentError, NotServedError, expected
from fusible.quantized import BlockScaledStorage, BlockScalingQuantizer, QuantizedTensor, register_block_format
from fusible.tex import DType
from fusible.tex.backends.cpu.blocks import FORMATS, BlockKernels
from fusible.tex.backends.torch_backend.blocks import block_amax, scale_blocks_
from fusible.tex.backends.torch_backend.number_formats import decode_e2m1_pairs, decode_e8m0, encode_e2m1, factor_of_e8m0, pack_nibbles
from fusible.tex.backends.xla import native_blocks
from fusible.tex.backends.xla.block_fp8 import BLOCK_FP8
from fusible.tex.backends.xla.number_formats import decode_e2m1, unpack_nibbles
from fusible.tex.formats import BlockCodec, BlockFormat, Copy, Scheme
from fusible.tex.formulas.arrays import Array
from fusible.tex.protocol import QuantizerLike, outer

__all__ = ["MXFP4WeightQuantizer", "MXFP4WeightStorage", "MXFP4WeightTensor", "MXFP4_WEIGHTS"]


class MXFP4WeightFormat(BlockFormat):
    """Two elements to a byte, the even one low, ``[*leading, K / 2]``; the scales are bytes ``s`` that stand for ``2^(s - 127)``, ``[M, K / 32]``."""

    name = "mxfp4_weight"
    length = 32
    packed = 2
    swizzles = False
    scales_are_exponents = True

    def element(self, x: Any) -> Any:
        return x._fp4_dtype

    def options(self, quantizer: Any) -> dict[str, Any]:
        return {"fp4_dtype": DType.kFloat4E2M1}

    def scale_multiples(self, columnwise: bool) -> tuple[int, int]:
        return 1, 1

    def check_quantizer(self, quantizer: Any) -> None:
        if quantizer.columnwise_usage:
            do = "quantize with columnwise=False"
            raise ArgumentError(expected("row-wise usage alone", of="a quantizer of MXFP4 weights", got="column-wise usage", do=do))

    def fits(self, shape: Sequence[int]) -> bool:
        """Blocks lie within their rows, of which any number will do."""
        return len(shape) > 0 and shape[-1] % self.length == 0


MXFP4_WEIGHTS: MXFP4WeightFormat = MXFP4WeightFormat.value()
_SCHEME = Scheme(MXFP4_WEIGHTS.name, MXFP4_WEIGHTS)
_BLOCK = (1, MXFP4_WEIGHTS.length)


def _encode(x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool) -> tuple[dict[str, Tensor], Iterator[Copy]]:
    """Scales ``2^(floor(log2(amax)) - 2)``, so that the largest element is one of 4 to 8, and saturates at 6; 0xFF, which is NaN, of a block with an
    element that is not finite."""
    lines = x.to(torch.float32, copy=True).contiguous()
    exponent = block_amax(lines, _BLOCK).view(torch.int32) >> 23  # of a number that is not negative: floor(log2) + 127
    code = torch.where(exponent == 0xFF, exponent, (exponent - 2).clamp_min(0)).to(torch.uint8)
    packed = pack_nibbles(encode_e2m1(scale_blocks_(lines, factor_of_e8m0(code), _BLOCK)))
    return {}, iter([("rowwise", packed, code)])


def _values(x: Any, way: str, scales: Tensor, shape: tuple[int, int], undo: bool) -> tuple[Tensor, None]:
    values = decode_e2m1_pairs(x._rowwise_data.reshape(shape[0], shape[1] // 2))
    return scale_blocks_(values, decode_e8m0(scales), _BLOCK), None


def _decode(x: Any, way: str, scales: Tensor, values: Tensor) -> bool:
    found, _ = _values(x, way, scales, (values.shape[0], values.shape[1]), False)
    values.copy_(found)
    return False


def _not_encoded(x: Any, quantizer: QuantizerLike, rowwise: bool, columnwise: bool) -> NoReturn:
    raise NotServedError(
        expected("weights that are quantized before", of="MXFP4 in a compiled program", got="a call to do so", do="quantize them eagerly")
    )


def _lazy_values(x: Any, way: str, scales: Any, shape: tuple[int, int], undo: bool) -> tuple[Any, None]:
    codes = unpack_nibbles(lazy.reshape(x._rowwise_data, (shape[0], shape[1] // 2)))
    return BLOCK_FP8.multiplied(decode_e2m1(codes), scales, _BLOCK), None


MXFP4_WEIGHTS.codecs.update({"torch": BlockCodec(_encode, _values), "lazy": BlockCodec(_not_encoded, _lazy_values)})
FORMATS[MXFP4_WEIGHTS] = BlockKernels(None, _decode)  # products read codes and scales as they lie
native_blocks.FORMATS[MXFP4_WEIGHTS] = native_blocks.BlockKernels(None)


class MXFP4WeightStorage(BlockScaledStorage):
    """E2M1 with one power of two per 32 elements of a row: value = element times ``2^(s - 127)`` of its block's byte ``s``.

    ``_rowwise_data``: uint8 ``[*leading, K / 2]``; ``_rowwise_scale_inv``: uint8 ``[M, K / 32]``, not padded. There is no column-wise copy.
    """

    _FORMAT = MXFP4_WEIGHTS
    _OPTIONS = ("fp4_dtype",)

    def __init__(
        self,
        rowwise_data: Array | None,
        rowwise_scale_inv: Array | None,
        columnwise_data: Array | None,
        columnwise_scale_inv: Array | None,
        fp4_dtype: int,
        quantizer: QuantizerLike | None,
        *,
        fake_dtype: torch.dtype | None = None,
    ) -> None:
        copies = (rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv)
        self._hold(quantizer, fake_dtype, *copies, fp4_dtype=DType(fp4_dtype))

    def _row_step(self) -> int:
        return 1


class MXFP4WeightTensor(QuantizedTensor, MXFP4WeightStorage):
    """A ``torch.Tensor`` of MXFP4 weights; arguments like ``Float8Tensor``'s."""


class MXFP4WeightQuantizer(BlockScalingQuantizer):
    """E2M1 with a power of two per 32 elements of a row: ``2^(floor(log2(amax)) - 2)``, as the OCP's specification has it."""

    _SCHEME = _SCHEME

    def __init__(self, *, rowwise: bool = True, columnwise: bool = False) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = DType.kFloat4E2M1

    def is_quantizable(self, inp: Any) -> bool:
        return len(inp.shape) > 1 and outer(inp.shape) > 0 and MXFP4_WEIGHTS.fits(inp.shape)


register_block_format(MXFP4WeightQuantizer, MXFP4WeightTensor)
