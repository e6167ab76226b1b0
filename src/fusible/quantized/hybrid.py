"""Tensors whose row-wise and column-wise copies are quantized apart, each by a quantizer of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Self

import torch

from fusible import tex
from fusible.errors import ArgumentError, DTypeError, expected
from fusible.quantized.arguments import AnyTensor, Buffers, Device, DTypeLike, Extracted, NoopFlag, Saved, Source, Storage, Target
from fusible.quantized.gathered import whole_fields
from fusible.quantized.quantizer import Quantizer
from fusible.quantized.saving import register_saved
from fusible.quantized.storage import FieldStorage, QuantizedTensorStorage, detached, note_written
from fusible.quantized.tensor import QuantizedTensor
from fusible.tex.protocol import check_no_part, to_torch

__all__ = ["HybridQuantizedTensor", "HybridQuantizedTensorStorage", "HybridQuantizer", "operand"]

_SOURCES = ("original", "rowwise_dequantized")


def operand(x: Any, columnwise: bool = False) -> Any:
    """The operand of a matrix product that reads ``x`` row-wise or column-wise: a plain tensor, or a quantized one that tex knows.

    A hybrid tensor gives the copy of that usage, an identity tensor the tensor it keeps; anything else is itself. Raises ``ArgumentError`` where a
    hybrid tensor lacks that copy.
    """
    return x.operand(columnwise) if isinstance(x, QuantizedTensorStorage) else x


class HybridQuantizedTensorStorage(FieldStorage):
    """``_rowwise_storage`` and ``_columnwise_storage``: quantized tensors (or storages) of one shape, of any formats; at least one is there."""

    _PARTS: ClassVar[dict[str, str]] = {"rowwise_storage": "_rowwise_storage", "columnwise_storage": "_columnwise_storage"}

    _rowwise_storage: Any
    _columnwise_storage: Any

    def __init__(self, *, rowwise_storage: Any, columnwise_storage: Any, quantizer: Quantizer | None, fake_dtype: torch.dtype | None = None) -> None:
        self._rowwise_storage = rowwise_storage
        self._columnwise_storage = columnwise_storage
        self._quantizer = quantizer
        self._dtype = fake_dtype if fake_dtype is not None else torch.float32

    @property
    def rowwise_sub_storage(self) -> Any:
        """The row-wise copy, or None."""
        return self._rowwise_storage

    @property
    def columnwise_sub_storage(self) -> Any:
        """The column-wise copy, or None."""
        return self._columnwise_storage

    def _present_parts(self) -> dict[str, Any]:
        """The copies that are there, by argument."""
        parts = {name: getattr(self, attribute) for name, attribute in self._PARTS.items()}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def shape(self) -> Any:
        return next(iter(self._present_parts().values())).shape

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": self._rowwise_storage is not None, "columnwise": self._columnwise_storage is not None}

    def get_data_tensors(self) -> tuple[Any, ...]:
        """The data of both copies."""
        return tuple(tensor for part in self._present_parts().values() for tensor in part.get_data_tensors())

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a copy; None leaves one as it is. Raises ``ArgumentError`` for one that is not there, and where none would be left."""
        has, asked = self.get_usages(), {"rowwise": rowwise_usage, "columnwise": columnwise_usage}
        wanted = {way: has[way] if asked[way] is None else asked[way] for way in has}
        missing = [way for way in has if wanted[way] and not has[way]]
        if missing:
            got, do = f"a request for {missing[0]} data", "quantize the unquantized tensor with that usage"
            raise ArgumentError(expected("the copies that were made", of="a hybrid tensor", got=got, do=do))
        if not any(wanted.values()):
            raise ArgumentError(expected("at least one usage", of="a hybrid tensor", got="neither row-wise nor column-wise", do="keep one"))
        for way in has:
            if not wanted[way]:
                setattr(self, f"_{way}_storage", None)

    def operand(self, columnwise: bool) -> Any:
        part = self._columnwise_storage if columnwise else self._rowwise_storage
        if part is None:
            way, do = "column-wise" if columnwise else "row-wise", "quantize it with that usage"
            raise ArgumentError(expected(f"a {way} copy", of="a hybrid tensor in a product", got="the other one alone", do=do))
        return part.operand(columnwise)

    def _dequantized(self, dtype: DTypeLike) -> Any:
        return detached(next(iter(self._present_parts().values())).dequantize(dtype=dtype))

    def _mapped(self, move: Callable[[Any], Any], quantizer: Callable[[Any], Any] = lambda quantizer: quantizer) -> dict[str, Any]:
        fields = {**self.get_metadata(), "quantizer": quantizer(self._quantizer)}
        for name, part in self._present_parts().items():
            fields[name] = _rebuilt(part, part._mapped(move, quantizer))
        return fields

    def prepare_for_saving(self) -> tuple[list[Any], Self]:
        return [tensor for part in self._own_parts() for tensor in part.prepare_for_saving()[0]], self

    def restore_from_saved(self, tensors: Saved) -> list[Any]:
        for part in self._present_parts().values():
            tensors = part.restore_from_saved(tensors)
        return tensors

    def clear(self) -> None:
        for part in self._own_parts():
            part.clear()

    def _own_parts(self) -> Iterator[Any]:
        """The copies that are there, first replaced by objects of this tensor's own: emptying one must not empty another tensor that shares it, as
        ``detach`` gives."""
        for name, part in self._present_parts().items():
            own = _rebuilt(part, part.get_metadata())
            setattr(self, self._PARTS[name], own)
            yield own

    def copy_from_storage(self, src: Storage) -> None:
        if not self._same_format(src):
            raise ArgumentError(expected(f"the format and options of {self!r}", of="copy_from_storage", got=repr(src), do="quantize it likewise"))
        theirs = src._present_parts()
        for name, part in self._present_parts().items():
            if name in theirs:
                part.copy_from_storage(theirs[name])

    def _write_where(self, values: torch.Tensor, changed: torch.Tensor) -> None:
        made: Any = None
        for part in (self._rowwise_storage, self._columnwise_storage):
            if part is not None:
                made = part._quantized_like(values if part is self._rowwise_storage else self._quantizer._columnwise_of(values, made))
                part._take_where(made, changed)
        note_written(self)

    def _same_format(self, other: Any) -> bool:
        if not isinstance(other, HybridQuantizedTensorStorage):
            return False
        mine, theirs = self._present_parts(), other._present_parts()
        return all(mine[name]._same_format(theirs[name]) for name in mine.keys() & theirs.keys())

    def _takes_bytes_of(self, other: Any) -> bool:
        if not isinstance(other, HybridQuantizedTensorStorage):
            return False
        theirs = other._present_parts()
        if self._quantizer.columnwise_source != other._quantizer.columnwise_source:
            return False
        return all(name in theirs and part._takes_bytes_of(theirs[name]) for name, part in self._present_parts().items())

    def _viewed(self, shape: tuple[int, ...]) -> dict[str, Any] | None:
        fields = self.get_metadata()
        for name, part in self._present_parts().items():
            viewed = part._viewed(shape)
            if viewed is None:
                return None
            fields[name] = _rebuilt(part, viewed, shape)
        return fields

    def _fits(self, shape: Sequence[int]) -> bool:
        return all(part._fits(shape) for part in self._present_parts().values())

    def _row_step(self) -> int:
        return max(part._row_step() for part in self._present_parts().values())  # powers of two

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        return tuple(f"{self._PARTS[name]}.{field}" for name, part in self._present_parts().items() for field in part.fsdp_buffer_fields())

    def fsdp_extract_buffers(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found = {name: part.fsdp_extract_buffers() for name, part in self._present_parts().items()}
        buffers = tuple(buffer for parts, _ in found.values() for buffer in parts)
        told = {
            name: (len(parts), meta, self._present_parts()[name], self._present_parts()[name].get_usages()) for name, (parts, meta) in found.items()
        }
        return buffers, {"field_names": self.fsdp_buffer_fields(), "parts": told}

    def _of_rows(self, buffers: Sequence[Any], meta: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
        fields, left, shape = {}, list(buffers), ()
        for name, (count, inner, like, usages) in meta["parts"].items():
            mine, left = left[:count], left[count:]
            whole, fields_of_part = like._of_rows(mine, inner)
            if shape and whole != shape:
                raise ValueError(f"rows of {list(whole)} and of {list(shape)}")
            shape = whole
            fields[name] = _rebuilt(like, {**like.get_metadata(), **dict.fromkeys(like._TENSORS), **fields_of_part}, shape)
            fields[name].update_usage(rowwise_usage=usages["rowwise"], columnwise_usage=usages["columnwise"])
        return shape, fields

    def fsdp_assign_gathered(self, gathered: Buffers, meta: Extracted) -> None:
        fields = whole_fields(self, gathered, meta)
        for name, attribute in self._PARTS.items():
            setattr(self, attribute, fields.get(name))

    def _check_buffers(self, shape: tuple[int, ...]) -> str | None:
        parts = self._present_parts()
        others = [f"{name} of {list(part.shape)}" for name, part in parts.items() if tuple(part.shape) != shape]
        return "no data" if not parts else others[0] if others else None

    def __repr__(self) -> str:
        told = [f"{way}={type(part).__name__}" for way, part in (("rowwise", self._rowwise_storage), ("columnwise", self._columnwise_storage))]
        return f"{type(self).__name__}({', '.join(told)}, dtype={self._dtype})"


def _rebuilt(part: Any, fields: dict[str, Any], shape: Sequence[int] | None = None) -> Any:
    """A tensor or storage of the class of ``part`` with other fields."""
    if not isinstance(part, QuantizedTensor):
        return type(part)(**fields)
    return part._made(part.shape if shape is None else shape, fields)


class HybridQuantizedTensor(QuantizedTensor, HybridQuantizedTensorStorage):
    """A tensor with a row-wise and a column-wise copy of formats of their own; its values are those of the row-wise one where it is there."""


class HybridQuantizer(Quantizer):
    """Quantizes row-wise by ``rowwise_quantizer`` and column-wise by ``columnwise_quantizer``, two objects that become this one's own.

    The column-wise copy is made of the tensor (``columnwise_source="original"``), or of the values of the row-wise one (``"rowwise_dequantized"``).
    """

    _RECIPE = "CustomRecipe"

    def __init__(self, *, rowwise_quantizer: Quantizer, columnwise_quantizer: Quantizer, columnwise_source: str = "original") -> None:
        super().__init__()
        for name, quantizer in (("rowwise_quantizer", rowwise_quantizer), ("columnwise_quantizer", columnwise_quantizer)):
            if not isinstance(quantizer, Quantizer):
                got = type(quantizer).__qualname__
                raise DTypeError(expected("a Quantizer", of=f"{name} of a HybridQuantizer", got=got, do="pass a quantizer"))
        if rowwise_quantizer is columnwise_quantizer:
            do = "make one for each direction"
            raise ArgumentError(expected("two quantizers", of="a HybridQuantizer", got="the same object twice", do=do))
        if columnwise_source not in _SOURCES:
            wanted = " or ".join(map(repr, _SOURCES))
            raise ArgumentError(expected(wanted, of="columnwise_source", got=repr(columnwise_source), do="pass one of the two"))
        self.rowwise_quantizer = rowwise_quantizer
        self.columnwise_quantizer = columnwise_quantizer
        self.columnwise_source = columnwise_source
        rowwise_quantizer.set_usage(rowwise=True, columnwise=False)
        columnwise_quantizer.set_usage(rowwise=False, columnwise=True)

    @property
    def with_amax_reduction(self) -> bool:
        """Whether a part of this quantizer takes amaxes over a group."""
        return any(getattr(part, "with_amax_reduction", False) for part in self._parts)

    @with_amax_reduction.setter
    def with_amax_reduction(self, value: bool) -> None:
        self._set_of_parts("with_amax_reduction", value)

    @property
    def amax_reduction_group(self) -> Any:
        """The group over which amaxes are taken, or None."""
        return next((group for group in (getattr(part, "amax_reduction_group", None) for part in self._parts) if group is not None), None)

    @amax_reduction_group.setter
    def amax_reduction_group(self, group: Any) -> None:
        self._set_of_parts("amax_reduction_group", group)

    def _set_of_parts(self, option: str, value: Any) -> None:
        for part in self._parts:
            if hasattr(part, option):
                setattr(part, option, value)

    @property
    def _parts(self) -> tuple[Quantizer, Quantizer]:
        return self.rowwise_quantizer, self.columnwise_quantizer

    def copy(self) -> Self:
        other = super().copy()
        other.rowwise_quantizer, other.columnwise_quantizer = (part.copy() for part in self._parts)
        return other

    def _made(self, shape: Sequence[int], dtype: DTypeLike, rowwise: Any, columnwise: Any, *, of_torch: bool = True) -> Any:
        parts = {"rowwise_storage": rowwise, "columnwise_storage": columnwise, "quantizer": self}
        if self.internal or not of_torch:
            return HybridQuantizedTensorStorage(fake_dtype=to_torch(dtype), **parts)
        return HybridQuantizedTensor(shape, to_torch(dtype), **parts)

    def _columnwise_of(self, tensor: Any, rowwise: Any) -> Any:
        """The tensor from which the column-wise copy is quantized."""
        if self.columnwise_source == "original":
            return tensor
        return (rowwise if rowwise is not None else self.rowwise_quantizer.quantize(tensor)).dequantize(dtype=tensor.dtype)

    def _check_usages(self) -> None:
        if not (self.rowwise_usage or self.columnwise_usage):
            raise ArgumentError(expected("rowwise or columnwise usage", of="a quantizer", got="neither", do="set one of the two usages"))

    def quantize_impl(self, tensor: Source) -> Any:
        """``tensor`` quantized twice."""
        self._check_usages()
        tensor = detached(tensor)
        rowwise = self.rowwise_quantizer.quantize(tensor) if self.rowwise_usage else None
        columnwise = self.columnwise_quantizer.quantize(self._columnwise_of(tensor, rowwise)) if self.columnwise_usage else None
        return self._made(tensor.shape, tensor.dtype, rowwise, columnwise, of_torch=isinstance(tensor, torch.Tensor))

    def update_quantized(self, src: Source, dst: Target, *, noop_flag: NoopFlag | None = None) -> Any:
        """Quantize ``src`` into those copies of ``dst`` that are there and asked for."""
        if not isinstance(dst, HybridQuantizedTensorStorage):
            got = type(dst).__qualname__
            raise DTypeError(expected("a HybridQuantizedTensorStorage", of="what a HybridQuantizer writes to", got=got, do="pass one"))
        check_no_part(dst, "what a HybridQuantizer writes to")
        src = (src.dequantize() if isinstance(src, QuantizedTensorStorage) else src).detach()
        rowwise = dst._rowwise_storage if self.rowwise_usage else None
        if rowwise is not None:
            self.rowwise_quantizer.update_quantized(src, rowwise, noop_flag=noop_flag)
        if self.columnwise_usage and dst._columnwise_storage is not None:
            self.columnwise_quantizer.update_quantized(self._columnwise_of(src, rowwise), dst._columnwise_storage, noop_flag=noop_flag)
        return dst

    def _made_empty(self, shape: Iterable[int], dtype: DTypeLike | None, device: Device | None, pin_memory: bool) -> Any:
        self._check_usages()
        size = tuple(shape)
        parts = [
            part.make_empty(size, dtype=dtype, device=device, pin_memory=pin_memory) if asked else None
            for part, asked in zip(self._parts, (self.rowwise_usage, self.columnwise_usage), strict=True)
        ]
        return self._made(size, dtype, *parts)

    def calibrate(self, tensor: Source) -> None:
        """Update the state of both quantizers."""
        for part in self._parts:
            part.calibrate(tensor)

    def is_quantizable(self, inp: AnyTensor) -> bool:
        return all(part.is_quantizable(inp) for part in self._parts)

    def is_requantization_safe(self) -> bool:
        """Whether every quantizer that is asked gives the same values again."""
        asked = [self.rowwise_quantizer] if self.rowwise_usage or self.columnwise_source != "original" else []
        asked += [self.columnwise_quantizer] if self.columnwise_usage else []
        return all(part.is_requantization_safe() for part in asked)

    def supports_only_rowwise_all_gather(self) -> bool:
        return self.rowwise_quantizer.supports_only_rowwise_all_gather()

    def __repr__(self) -> str:
        return f"HybridQuantizer({self.rowwise_quantizer!r}, {self.columnwise_quantizer!r}, {self.columnwise_source!r})"


def _kind(storage: HybridQuantizedTensorStorage) -> tuple[Any, ...]:
    data = next((tensor for tensor in storage.get_data_tensors() if tensor is not None), None)
    return "hybrid", "cpu" if data is None else data.device.type, storage._dtype


# No backend serves these kinds: a product reads the operand within, and everything else the values.
tex.register_kind(HybridQuantizedTensorStorage, _kind)
tex.register_kind(HybridQuantizedTensor, _kind)
tex.register_kind(HybridQuantizer, lambda quantizer: ("hybrid", None, 2 * quantizer.rowwise_usage + quantizer.columnwise_usage))
register_saved(HybridQuantizedTensorStorage, HybridQuantizedTensor, HybridQuantizer)
