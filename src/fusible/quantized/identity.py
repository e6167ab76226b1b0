"""Unquantized tensors behind the interface of quantized ones, for directions and operands that a recipe leaves in high precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, ClassVar

import torch

from fusible import tex
from fusible.errors import DTypeError, ShapeError, expected
from fusible.quantized.arguments import Device, DTypeLike, NoopFlag, Source, Target
from fusible.quantized.quantizer import Quantizer
from fusible.quantized.saving import register_saved
from fusible.quantized.storage import FieldStorage, QuantizedTensorStorage
from fusible.quantized.tensor import QuantizedTensor
from fusible.tex.formulas.arrays import Array
from fusible.tex.protocol import QuantizerLike, to_torch

__all__ = ["IdentityQuantizer", "IdentityTensor", "IdentityTensorStorage"]


class IdentityTensorStorage(FieldStorage):
    """``_hp_data``: the tensor itself, in the nominal dtype; it serves row-wise and column-wise."""

    _TENSORS: ClassVar[dict[str, str]] = {"hp_data": "_hp_data"}
    _ALIKE = "hp_data"

    _hp_data: Any

    def __init__(self, *, hp_data: Array | None, fake_dtype: torch.dtype | None = None, quantizer: QuantizerLike | None = None) -> None:
        self._hp_data = hp_data
        self._dtype = fake_dtype if fake_dtype is not None else to_torch(hp_data.dtype) if hp_data is not None else torch.float32
        self._quantizer = quantizer

    @property
    def shape(self) -> Any:
        return self._hp_data.shape

    def get_usages(self) -> dict[str, bool]:
        return dict.fromkeys(("rowwise", "columnwise"), self._hp_data is not None)

    def get_data_tensors(self) -> tuple[Any, Any]:
        return self._hp_data, None

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Nothing: the one tensor serves both usages."""

    def operand(self, columnwise: bool) -> Any:
        return self._hp_data

    def _dequantized(self, dtype: DTypeLike) -> Any:
        dtype = to_torch(dtype) if isinstance(self._hp_data, torch.Tensor) else dtype
        # A tensor object of its own: autograd writes on what a function returns.
        return self._hp_data.detach().to(dtype) if isinstance(self._hp_data, torch.Tensor) else tex.prim.cast(self._hp_data, dtype)

    def _viewed(self, shape: tuple[int, ...]) -> dict[str, Any] | None:
        return {**self.get_metadata(), "hp_data": tex.prim.reshape(self._hp_data, shape)} if prod(shape) == prod(self._hp_data.shape) else None

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        return ("_hp_data",)

    def fsdp_extract_buffers(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self._hp_data,), {"field_names": self.fsdp_buffer_fields()}

    def _of_rows(self, buffers: Sequence[Any], meta: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
        return tuple(buffers[0].shape), {"hp_data": buffers[0]}

    def _check_buffers(self, shape: tuple[int, ...]) -> str | None:
        if self._hp_data is None or tuple(self._hp_data.shape) != shape or self._hp_data.dtype is not self._dtype:
            return "no data" if self._hp_data is None else f"hp_data of {self._hp_data.dtype} {list(self._hp_data.shape)}"
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._dtype}, {self._hp_data})"


class IdentityTensor(QuantizedTensor, IdentityTensorStorage):
    """An unquantized tensor in the place of a quantized one: ``IdentityTensor(shape, dtype, *, hp_data, quantizer=None, requires_grad=False)``.

    Its parts and views share its memory, as those of a plain tensor do.
    """

    def _of_values(self, data: torch.Tensor | None, cut: Callable[[torch.Tensor], torch.Tensor], moves: bool = True) -> Any:
        assert data is not None
        return self._made(data.shape, {**self.get_metadata(), "hp_data": data}, device=self.device)

    def _rows(self, start: int, stop: int) -> Any:
        return self._of_values(self._hp_data[start:stop], lambda x: x[start:stop])


class IdentityQuantizer(Quantizer):
    """Keeps tensors as they are, or casts them to ``dtype``."""

    _RECIPE = "CustomRecipe"

    def __init__(self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = dtype

    def _made(self, data: Array) -> Any:
        if self.internal or not isinstance(data, torch.Tensor):
            return IdentityTensorStorage(hp_data=data, quantizer=self)
        return IdentityTensor(data.shape, data.dtype, hp_data=data, quantizer=self)

    def quantize_impl(self, tensor: Source) -> Any:
        """A tensor of this kind around ``tensor`` itself, whatever its strides, or around a cast copy where the dtype differs."""
        if not isinstance(tensor, torch.Tensor):
            return self._made(tensor if self.dtype is None else tex.prim.cast(tensor, self.dtype))
        data = tensor.detach()
        return self._made(data if self.dtype in (None, data.dtype) else data.to(self.dtype).contiguous())

    def update_quantized(self, src: Source, dst: Target, *, noop_flag: NoopFlag | None = None) -> Any:
        if not isinstance(dst, IdentityTensorStorage):
            got = type(dst).__qualname__
            raise DTypeError(expected("an IdentityTensorStorage", of="what an IdentityQuantizer writes to", got=got, do="pass one"))
        values = (src.dequantize() if isinstance(src, QuantizedTensorStorage) else src).detach()
        data = dst._hp_data
        if values.is_meta and not data.is_meta:
            of = "the tensor to quantize into an IdentityTensor"
            raise DTypeError(expected(f"one on {data.device}", of=of, got="one on meta", do="make it on the device of output"))
        if tuple(values.shape) != tuple(data.shape):
            of = "the tensor to quantize into an IdentityTensor"
            raise ShapeError(expected(str(list(data.shape)), of=of, got=list(values.shape), do="pass that shape"))
        values = values.to(data.dtype)
        data.copy_(values if noop_flag is None else torch.where(noop_flag == 1, data, values))
        return dst

    def _made_empty(self, shape: Iterable[int], dtype: DTypeLike | None, device: Device | None, pin_memory: bool) -> Any:
        return self._made(torch.empty(tuple(shape), dtype=self.dtype or to_torch(dtype), device=device, pin_memory=pin_memory))

    def is_requantization_safe(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"IdentityQuantizer({self.dtype}, rowwise={self.rowwise_usage}, columnwise={self.columnwise_usage})"


def _kind(storage: IdentityTensorStorage) -> tuple[Any, ...]:
    data = storage._hp_data
    return "identity", "cpu" if data is None else data.device.type, storage._dtype


# No backend serves these kinds: a product reads the operand within, and everything else the values.
tex.register_kind(IdentityTensorStorage, _kind)
tex.register_kind(IdentityTensor, _kind)
tex.register_kind(IdentityQuantizer, lambda quantizer: ("identity", quantizer.dtype, 2 * quantizer.rowwise_usage + quantizer.columnwise_usage))
register_saved(IdentityTensorStorage, IdentityTensor, IdentityQuantizer)
