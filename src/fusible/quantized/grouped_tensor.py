"""Grouped tensors that are torch tensors: the weights of all experts as one parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from fusible import tex
from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.quantized.arguments import Buffers, Dense, DTypeLike, Extracted, Grouped, NoopFlag, Source, Storage
from fusible.quantized.gathered import whole_fields
from fusible.quantized.group_buffers import empty_member
from fusible.quantized.grouped import GROUPED_BUFFERS, GroupedTensorStorage, kind_of_grouped
from fusible.quantized.quantizer import Quantizer
from fusible.quantized.saving import register_saved
from fusible.quantized.storage import note_written
from fusible.quantized.tensor import QuantizedTensor, recorded_amax
from fusible.quantized.tensor_operations import FLOATS
from fusible.tex.calls.argument_kinds import shown
from fusible.tex.calls.grouped import layout_of_grouped, member_fields
from fusible.tex.protocol import to_torch

__all__ = ["GroupedTensor"]

_OF_WAYS = {"rowwise": ("rowwise_data", "scale_inv", "amax"), "columnwise": ("columnwise_data", "columnwise_scale_inv", "columnwise_amax")}
_OFFSETS = ("offsets", "scale_inv_offsets", "columnwise_scale_inv_offsets")


class GroupedTensor(QuantizedTensor, GroupedTensorStorage):
    """A ``torch.Tensor`` over the buffers of a grouped tensor; arguments are those of ``GroupedTensorStorage``.

    Its shape is ``[num_tensors, *member]`` where ``shapes`` says that all members have one shape, else ``[rows, columns]`` of all stacked. Operations
    see the values so arranged, dequantized where there is a quantizer; what they write goes to the members. Members of different widths have no such
    arrangement: only ``split_into_quantized_tensors`` reads them. Checkpoints take a grouped tensor; FSDP2 takes a stack (``of_stack``), which
    it cuts between its members.
    """

    _STORAGE = GroupedTensorStorage
    _ALIKE = ""

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

    @classmethod
    def of_stack(cls, values: Dense, quantizer: Quantizer) -> Self:
        """``values [count, rows, columns]``, each of the matrices quantized by itself. Raises ``ShapeError`` for another number of dimensions, or
        sizes that the format does not hold."""
        if values.dim() != 3 or not len(values):
            do = "stack matrices"
            raise ShapeError(
                expected("at least one matrix, [count, rows, columns]", of=f"values of {cls.__name__}.of_stack", got=list(values.shape), do=do)
            )
        count, *member = values.shape
        found = tex.group_quantize(values.detach().reshape(-1, member[-1]), quantizer, count, None, None, None, None, None)
        made = cls(found.logical_shape, values.dtype, **{**_fields(found), "shapes": [tuple(member)] * count})
        for name in set(GROUPED_BUFFERS).difference(member_fields(quantizer)):  # what was seen on the way, which nobody reads again
            setattr(made, name, None)
        return made

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

    def _write_where(self, values: torch.Tensor, changed: torch.Tensor) -> None:
        self.quantize_(values)

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

    def _viewed(self, shape: tuple[int, ...]) -> dict[str, Any] | None:
        return self.get_metadata() if tuple(shape) == tuple(self.shape) else None

    def _empty(self, shape: Sequence[int], dtype: torch.dtype | None, device: torch.device | str | None, pin_memory: bool) -> Any:
        (count, *member), dtype = shape or (0,), dtype or self.fake_dtype
        if dtype not in FLOATS or pin_memory or not count or self._member() != tuple(member):
            return NotImplemented
        quantizer = self._quantizer.with_usages(**self.get_usages())
        made = type(self).make_grouped_tensor_with_shapes(count, [tuple(member)] * count, quantizer, torch.device(device or self.device), dtype)
        made.quantizer = self.quantizer
        return made

    def _member(self) -> tuple[int, ...] | None:
        """The shape of each member, where they are a stack: matrices of one shape, one after another, quantized by their own magnitudes. Else
        None."""
        shapes = set(map(tuple, self.tensor_shapes or ()))
        stacked = len(shapes) == 1 and self.tensor_offsets is None and self.quantizer is not None and recorded_amax(self.quantizer) is None
        return shapes.pop() if stacked and self.num_tensors else None

    def _stacked(self) -> tuple[int, ...]:
        member = self._member()
        if member is None or len(member) != 2:
            do = "make it by GroupedTensor.of_stack, or register its members as parameters"
            raise ArgumentError(expected("a stack of matrices scaled by their own magnitudes", of="FSDP2", got=repr(self), do=do))
        return member

    def _row_step(self) -> int:
        """A stack is divided between any two of its members."""
        return 1

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """The attributes that are gathered from the shards: of each copy by which a member would be gathered, its data and its scales. Raises
        ``ArgumentError`` for a group that is no stack."""
        member = self._stacked()
        like = empty_member(self._quantizer.with_usages(**self.get_usages()), member, self.fake_dtype, "meta")
        fields, gathered = member_fields(self._quantizer), like.fsdp_buffer_fields()
        ways = [way for way in _OF_WAYS if fields[f"{way}_data"] in gathered]
        return tuple(name for way in ways for name in _OF_WAYS[way] if name in fields and getattr(self, name) is not None)

    def fsdp_extract_buffers(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(buffers, meta)``: the buffers as ``[members, each one's part]``. Raises ``ArgumentError`` for a group that is no stack."""
        names = self.fsdp_buffer_fields()
        return tuple(getattr(self, name).view(self.num_tensors, -1) for name in names), {"field_names": names}

    def _of_rows(self, buffers: Sequence[Any], meta: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
        member, arguments = self._stacked(), {attribute: argument for argument, attribute in self._TENSORS.items()}
        named, count = dict(zip(meta["field_names"], buffers, strict=True)), buffers[0].shape[0]
        if any(tuple(buffer.shape) != (count, getattr(self, name).numel() // self.num_tensors) for name, buffer in named.items()):
            raise ValueError("parts of other members")
        return (count, *member), {arguments[name]: buffer.reshape(-1) for name, buffer in named.items()}

    def _reduce_amaxes(self, mesh: Any) -> None:
        """Nothing: a member lies in one process."""

    def _gathered(self, shape: Sequence[int], fields: dict[str, Any], dtype: torch.dtype, quantizer: Any, usages: dict[str, bool]) -> Self:
        count, rows, columns = shape
        described = {"num_tensors": count, "shapes": [(rows, columns)] * count, "quantizer": quantizer}
        made = type(self)((count * rows, columns), dtype, **{**_fields(self), **dict.fromkeys((*self._TENSORS, *_OFFSETS)), **fields, **described})
        made.update_usage(rowwise_usage=usages["rowwise"], columnwise_usage=usages["columnwise"])
        return made

    def fsdp_assign_gathered(self, gathered: Buffers, meta: Extracted) -> None:
        """Take buffers that were gathered along their first dimensions, or divided along them; copies that were not among them are dropped."""
        fields = whole_fields(self, gathered, meta)
        self._take([fields.get(argument) for argument in self._TENSORS])

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Make or drop the row-wise and the column-wise copies of a stack, as ``update_usage`` of its members does; None leaves one as it is. Raises
        ``ArgumentError`` for dropping the last copy, and for a group that is no stack."""
        self._stacked()
        asked = {"rowwise": rowwise_usage, "columnwise": columnwise_usage}
        wanted = {way: has if asked[way] is None else asked[way] for way, has in self.get_usages().items()}
        if not any(wanted.values()):
            do = "keep one"
            raise ArgumentError(expected("at least one usage", of="a GroupedTensor", got="neither row-wise nor column-wise", do=do))
        if missing := [way for way, has in self.get_usages().items() if wanted[way] and not has]:
            made, fields = self.split_into_quantized_tensors(), member_fields(self._quantizer)
            for member in made:
                member.update_usage(rowwise_usage=wanted["rowwise"] or None, columnwise_usage=wanted["columnwise"] or None)
            for name in (name for way in missing for name in _OF_WAYS[way] if name in fields):
                setattr(self, name, torch.cat([getattr(member, fields[name]).reshape(-1) for member in made]))
            self._share_buffers()
        for name in (name for way, keep in wanted.items() if not keep for name in _OF_WAYS[way]):
            setattr(self, name, None)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return GroupedTensorStorage.__repr__(self)


def _fields(x: GroupedTensorStorage) -> dict[str, Any]:
    fields = GroupedTensorStorage.get_metadata(x) | {name: getattr(x, name) for name in _OFFSETS}
    del fields["shape"], fields["dtype"]
    return {**fields, "shapes": x.tensor_shapes}


tex.register_kind(GroupedTensor, kind_of_grouped)
register_saved(GroupedTensor)
