"""``nvte.Tensor``: the one value that ops, fusions and pipelines pass around."""

from __future__ import annotations

from typing import Any, TypeAlias

from fusible.nvte.dtype import DType, QuantizedType, Type, element
from fusible.nvte.frameworks import nvte_dtype
from fusible.quantized import Float8TensorStorage, GroupedTensorStorage, QuantizedTensorStorage

__all__ = ["Data", "Tensor", "make_nvte_tensor"]

Data: TypeAlias = Any
"""What tex looks into: a tensor of some framework, or a bare quantized storage."""


class Tensor:
    """An immutable record: ``data`` is what tex looks into (a tensor of some framework, or a bare quantized storage), ``type`` what it is.

    ``shape`` and ``dtype`` (the element type) follow from them; a quantized one has ``scale_inv`` and perhaps a ``columnwise`` copy.
    """

    __slots__ = ("data", "type")

    data: Any
    type: Type

    def __init__(self, data: Any, type: Type) -> None:
        _set_data(self, data)
        _set_type(self, type)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"nvte.Tensor is immutable: {name} cannot be set")

    @property
    def dtype(self) -> DType:
        return element(self.type)

    @property
    def shape(self) -> tuple[int, ...]:
        type = self.type
        if type.__class__ is QuantizedType and type.logical:  # type: ignore[union-attr]
            return type.logical  # type: ignore[union-attr]
        try:
            return tuple(self.data.shape)
        except AttributeError:  # the storage of a caller's own quantizer, of which NVIDIA's products ask the size alone
            return tuple(self.data.size())

    @property
    def scale_inv(self) -> Any:
        """fp32 ``[1]`` of a quantized tensor, else None."""
        return getattr(self.data, "_scale_inv", None)

    @property
    def columnwise(self) -> Any:
        """The transposed 8-bit copy of a quantized tensor, where it was made, else None."""
        return getattr(self.data, "_transpose", None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tensor, (self.data, self.type)

    def __repr__(self) -> str:
        return f"Tensor({self.type}, {list(self.shape)})"


_set_data = Tensor.data.__set__  # type: ignore[attr-defined]
_set_type = Tensor.type.__set__  # type: ignore[attr-defined]


def make_nvte_tensor(data: Data | Tensor) -> Tensor:
    """Wrap a tensor of a framework (``torch.Tensor``, lazy tensor) or a quantized storage, without copying."""
    if isinstance(data, Tensor):
        return data
    if isinstance(data, Float8TensorStorage):
        return Tensor(data, QuantizedType(DType(int(data._fp8_dtype)), "current"))
    if isinstance(data, QuantizedTensorStorage):
        return Tensor(data, QuantizedType.of(data._quantizer).read(**data.get_usages()))
    if isinstance(data, GroupedTensorStorage) and data.quantizer is not None:
        return Tensor(data, QuantizedType.of(data.quantizer).read(**data.get_usages()))
    return Tensor(data, nvte_dtype(data.dtype))
