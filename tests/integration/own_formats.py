"""Block formats that no package brings: of any block length, with elements and scales of any type, for torch tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusible.quantized import BlockScaledStorage, BlockScalingQuantizer, QuantizedTensor, register_block_format
from fusible.tex import DType
from fusible.tex.backends.torch_backend.blocks import block_amax, scale_blocks_
from fusible.tex.formats import BlockCodec, BlockFormat, Copy, Scheme

__all__ = ["SCALES", "format_of", "quantizer_class"]

SCALES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
"""Types of scales; those of 8 bits are stored as bytes."""
_ELEMENTS = {DType.kByte: (torch.int8, 127.0), DType.kFloat8E4M3: (torch.float8_e4m3fn, 448.0)}


class _Lines:
    """The codec of a format: amax / largest as the scale of each ``length`` elements along a line."""

    def __init__(self, length: int, element: DType, scale: torch.dtype) -> None:
        self.block, self.scale = (1, length), scale
        self.element, self.largest = _ELEMENTS[element]

    def encode(self, x: Tensor, quantizer: Any, rowwise: bool, columnwise: bool) -> tuple[dict[str, Tensor], Iterator[Copy]]:
        sources = {way: lines for way, lines, asked in (("rowwise", x, rowwise), ("columnwise", x.t(), columnwise)) if asked}
        return {}, ((way, *self._cast(lines.to(torch.float32, copy=True).contiguous())) for way, lines in sources.items())

    def _cast(self, lines: Tensor) -> tuple[Tensor, Tensor]:
        scales = (block_amax(lines, self.block) / self.largest).to(self.scale)
        values = scale_blocks_(lines, torch.where(scales == 0, 0.0, 1 / scales.float()), self.block).clamp_(-self.largest, self.largest)
        elements = (values.round() if self.element is torch.int8 else values).to(self.element)
        return elements.view(torch.uint8), scales.view(torch.uint8) if scales.itemsize == 1 else scales

    def decode(self, x: Any, way: str, scales: Tensor, shape: tuple[int, int], undo: bool) -> tuple[Tensor, None]:
        values = getattr(x, f"_{way}_data").reshape(shape if way == "rowwise" else shape[::-1]).view(self.element).float()
        values = scale_blocks_(values, scales.view(self.scale).float(), self.block)
        return values if way == "rowwise" else values.t(), None


def format_of(name: str, length: int, element: DType, scale: torch.dtype) -> Any:
    """The format of that name, which has no codec yet."""

    class Own(BlockFormat):
        swizzles = False
        scale_dtype = torch.uint8 if scale.itemsize == 1 else scale

        def element(self, x: Any) -> DType:
            return element

        def options(self, quantizer: Any) -> dict[str, Any]:
            return {}

        def check_quantizer(self, quantizer: Any) -> None:
            """It has no options."""

    return type(name, (Own,), {"name": name, "length": length, "__qualname__": name}).value()  # type: ignore[attr-defined]


def quantizer_class(name: str, length: int, element: DType = DType.kFloat8E4M3, scale: torch.dtype = torch.float32) -> Any:
    """A quantizer's class, whose tensors are registered: ``element``s in blocks of ``length``, each with a ``scale``."""
    form = format_of(name, length, element, scale)
    lines = _Lines(length, element, scale)
    form.codecs["torch"] = BlockCodec(lines.encode, lines.decode)

    class Storage(BlockScaledStorage):
        _FORMAT = form

        def __init__(
            self,
            rowwise_data: Any,
            rowwise_scale_inv: Any,
            columnwise_data: Any,
            columnwise_scale_inv: Any,
            quantizer: Any,
            *,
            fake_dtype: Any = None,
        ) -> None:
            self._hold(quantizer, fake_dtype, rowwise_data, rowwise_scale_inv, columnwise_data, columnwise_scale_inv)

    class Quantizer(BlockScalingQuantizer):
        _SCHEME = Scheme(name, form)

        def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
            super().__init__(rowwise=rowwise, columnwise=columnwise)
            self.dtype = element

    storage = type(f"{name}TensorStorage", (Storage,), {})
    tensor = type(f"{name}Tensor", (QuantizedTensor, storage), {})
    quantizer = type(f"{name}Quantizer", (Quantizer,), {"__qualname__": f"{name}Quantizer"})
    register_block_format(quantizer, tensor)
    return quantizer
