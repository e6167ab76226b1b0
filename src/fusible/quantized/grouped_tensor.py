"""Grouped tensors that are torch tensors: the weights of all experts as one parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from fusible import tex
from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.quantized.arguments import DTypeLike, Grouped, NoopFlag, Source, Storage
from fusible.quantized.grouped import GroupedTensorStorage, kind_of_grouped
from fusible.quantized.saving import register_saved
from fusible.quantized.storage import note_written
from fusible.quantized.tensor import QuantizedTensor
from fusible.tex.calls.argument_kinds import shown
from fusible.tex.calls.grouped import layout_of_grouped
from fusible.tex.protocol import to_torch

__all__ = ["GroupedTensor"]

_OFFSETS = ("offsets", "scale_inv_offsets", "columnwise_scale_inv_offsets")


class GroupedTensor(QuantizedTensor, GroupedTensorStorage):
    """A ``torch.Tensor`` over the buffers of a grouped tensor; arguments are those of ``GroupedTensorStorage``.

    Its shape is ``[num_tensors, *member]`` where ``shapes`` says that all members have one shape, else ``[rows, columns]`` of all stacked. Operations
    see the values so arranged, dequantized where there is a quantizer; what they write goes to the members. Members of different widths have no such
    arrangement: only ``split_into_quantized_tensors`` reads them. Checkpoints take a grouped tensor; FSDP2 takes its members.
    """

    _STORAGE = GroupedTensorStorage

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        shapes: Sequence[Sequence[int]] | None = None,
        requires_grad: bool = False,
        stride: Any = None,
        device: Any = None,
        **fields: Any,
    ) -> Self:
        if shapes and all(tuple(member) == tuple(shapes[0]) for member in shapes):
            shape = (len(shapes), *shapes[0])
        if device is None:
            device = next((field.device for field in fields.values() if isinstance(field, torch.Tensor)), None)
        if device is None:
            raise ArgumentError(expected("tensors", of=f"the buffers of a {cls.__name__}", got="none", do="pass data"))
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device, requires_grad=requires_grad)

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, *, requires_grad: bool = False, stride: Any = None, **fields: Any) -> None:
        fields.pop("device", None)
        GroupedTensorStorage.__init__(self, shape, dtype, **fields)

    @classmethod
    def from_storage(cls, storage: Grouped, *, requires_grad: bool = False) -> Self:
        """A tensor over the buffers of ``storage``."""
        return cls(storage.logical_shape, storage.fake_dtype, requires_grad=requires_grad, **_fields(storage))

    @property
    def _dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.fake_dtype

    @property
    def _quantizer(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.quantizer

    def get_metadata(self) -> dict[str, Any]:
        """The fields, as the constructor takes them beside shape and dtype."""
        return _fields(self)

    def storage_without_autograd(self) -> GroupedTensorStorage:
        """The same buffers as a bare storage."""
        return GroupedTensorStorage(self.logical_shape, self.fake_dtype, **_fields(self))

    def copy(self) -> Self:
        """Another tensor over the same buffers."""
        return self._like(requires_grad=self.requires_grad)

    def quantize_(self, tensor: Source, *, noop_flag: NoopFlag | None = None) -> Self:
        """Overwrite all members with ``tensor``, of this tensor's shape; nothing where ``noop_flag[0] == 1``."""
        shapes = self._arranged()
        if not isinstance(tensor, torch.Tensor):
            tensor = tensor.dequantize()
        if tuple(tensor.shape) != tuple(self.shape):
            raise ShapeError(expected(str(list(self.shape)), of="tensor of GroupedTensor.quantize_", got=list(tensor.shape), do="pass that shape"))
        flat = tensor.detach().reshape(-1)
        parts = flat.split([math.prod(shape) for shape in shapes])
        self.quantize([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], noop_flag)
        note_written(self)
        return self

    def _arranged(self) -> tuple[tuple[int, ...], ...]:
        """The members' shapes, if their values lie one after another in this tensor's shape."""
        layout = layout_of_grouped(self)
        if len({shape[1:] for shape in layout.shapes}) > 1:
            of, do = "a GroupedTensor in an operation", "use split_into_quantized_tensors"
            raise ShapeError(expected("members of one width", of=of, got=[list(shape) for shape in layout.shapes], do=do))
        return layout.shapes if self.tensor_shapes is None else tuple(self.tensor_shapes)

    def _dequantized(self, dtype: DTypeLike) -> Any:
        self._arranged()
        dtype = to_torch(dtype)
        if self.quantizer is None and self.tensor_offsets is None:
            return self.rowwise_data.detach()[: math.prod(self.shape)].view(self.shape).to(dtype)
        members = self.split_into_quantized_tensors()
        values = [member if self.quantizer is None else member.dequantize(dtype=dtype) for member in members]
        return torch.cat([value.reshape(-1) for value in values]).view(self.shape).to(dtype)

    def _mapped(self, move: Callable[[Any], Any], quantizer: Callable[[Any], Any] = lambda quantizer: quantizer) -> dict[str, Any]:
        fields = _fields(self)
        moved = {name: move(value) for name, value in fields.items() if isinstance(value, torch.Tensor)}
        return {**fields, **moved, "quantizer": quantizer(self.quantizer)}

    def _made(self, shape: Sequence[int], fields: dict[str, Any], *, requires_grad: bool = False, **options: Any) -> Self:
        fields = dict(fields)
        dtype = fields.pop("fake_dtype", self.fake_dtype)
        if tuple(shape) != tuple(self.shape):
            of = "shape of a tensor like a GroupedTensor"
            raise ShapeError(expected(str(list(self.shape)), of=of, got=list(shape), do="leave it: the members' shapes say it"))
        if self.quantizer is None and dtype is not self.fake_dtype:
            of = "dtype of a tensor over the data of an unquantized GroupedTensor"
            raise DTypeError(expected(str(self.fake_dtype), of=of, got=dtype, do="cast it by to(dtype)"))
        return type(self)(self.logical_shape, dtype, requires_grad=requires_grad, **fields, **options)

    def _adopt(self, fields: dict[str, Any]) -> None:
        GroupedTensorStorage.__init__(self, self.logical_shape, self.fake_dtype, **fields)

    def _takes_bytes_of(self, other: Any) -> bool:
        if not isinstance(other, GroupedTensor) or layout_of_grouped(self) != layout_of_grouped(other):
            return False
        like = other.quantizer is None if self.quantizer is None else self.quantizer.quantizes_like(other.quantizer)
        return like and all(mine is None or (theirs is not None and mine.shape == theirs.shape) for mine, theirs in self._pairs(other))

    def _same_format(self, other: Any) -> bool:
        """False: the bytes of two groups cannot be concatenated, as each member has its own."""
        return False

    def copy_from_storage(self, src: Storage) -> None:
        """Copy the buffers that both have. Raises ``ArgumentError`` where ``src`` has other members or another format."""
        if not self._takes_bytes_of(src):
            raise ArgumentError(expected(f"members like those of {self!r}", of="copy_from_storage", got=shown(src), do="quantize them likewise"))
        for mine, theirs in self._pairs(src):
            if mine is not None:
                mine.copy_(theirs)

    def _pairs(self, other: Any) -> list[tuple[Any, Any]]:
        return list(zip(self.get_data_tensors(), other.get_data_tensors(), strict=True))

    def _viewed(self, shape: tuple[int, ...]) -> None:
        return None

    def _empty(self, shape: Sequence[int], dtype: torch.dtype | None, device: torch.device | str | None, pin_memory: bool) -> Any:
        return NotImplemented

    def _rows(self, start: int, stop: int) -> Any:
        return None

    def _of_rows(self, buffers: Sequence[Any], meta: dict[str, Any]) -> Any:
        return self.fsdp_extract_buffers()

    def fsdp_extract_buffers(self) -> Any:
        """Refused: the members of a shard would be cut."""
        raise ArgumentError(expected("tensors of their own", of="FSDP2", got="a GroupedTensor", do="register its members as parameters"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return GroupedTensorStorage.__repr__(self)


def _fields(x: GroupedTensorStorage) -> dict[str, Any]:
    fields = GroupedTensorStorage.get_metadata(x) | {name: getattr(x, name) for name in _OFFSETS}
    del fields["shape"], fields["dtype"]
    return {**fields, "shapes": x.tensor_shapes}


tex.register_kind(GroupedTensor, kind_of_grouped)
register_saved(GroupedTensor)
