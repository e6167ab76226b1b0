"""Quantizers and tensors of MXFP4."""

from __future__ import annotations

from typing import Any

from fusible.quantized import BlockScaledStorage, BlockScalingQuantizer, QuantizedTensor, register_block_format
from fusible.tex import DType
from mxfp4.number_format import MXFP4, MXFP4_SCHEME

__all__ = ["MXFP4Quantizer", "MXFP4Tensor", "MXFP4TensorStorage"]


class MXFP4TensorStorage(BlockScaledStorage):
    """E2M1 with one power of two per 32 elements: value = element times ``2^(s - 127)`` of its block's byte ``s``."""

    _FORMAT = MXFP4
    _OPTIONS = ("fp4_dtype",)

    def __init__(
        self,
        rowwise_data: Any,
        rowwise_scale_inv: Any,
        columnwise_data: Any,
        columnwise_scale_inv: Any,
        fp4_dtype: Any,
        quantizer: Any,
        *,
        fake_dtype: Any = None,
    ) -> None:
        copies = (rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv)
        self._hold(quantizer, fake_dtype, *copies, fp4_dtype=DType(fp4_dtype))


class MXFP4Tensor(QuantizedTensor, MXFP4TensorStorage):
    """A ``torch.Tensor`` in MXFP4."""


class MXFP4Quantizer(BlockScalingQuantizer):
    """E2M1 with a power of two per 32 elements: ``2^(floor(log2(amax)) - 2)``, so that the largest element is one of 4 to 8, and saturates at 6."""

    _SCHEME = MXFP4_SCHEME

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = DType.kFloat4E2M1


register_block_format(MXFP4Quantizer, MXFP4Tensor)
