"""Quantized data without autograd: the fields of a format and what can be done with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch.autograd.graph import increment_version

from fusible import tex
from fusible.errors import ArgumentError, ShapeError, expected
from fusible.quantized.arguments import Buffers, DTypeLike, Extracted, NoopFlag, QuantizerLike, Saved, Source, Storage, check_methods
from fusible.quantized.gathered import check_saved, whole_fields
from fusible.quantized.shapes import resolved, size_of, viewed
from fusible.tex import DType
from fusible.tex.formats import FLOAT8, Format
from fusible.tex.formulas.arrays import Array

__all__ = ["FieldStorage", "Float8TensorStorage", "QuantizedTensorStorage", "detached", "kind_of", "note_current", "note_written", "share_notes"]


class QuantizedTensorStorage:
    """Base of the bare storages: ``_dtype`` is the nominal (unquantized) dtype, ``_quantizer`` what made the data.

    A custom quantizer's storage may derive from it directly, and have the fields it likes; those of this package derive from ``FieldStorage``.
    """

    _dtype: Any
    _quantizer: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_methods(cls)

    def quantize_(self, tensor: Source, *, noop_flag: NoopFlag | None = None) -> Self:
        """Overwrite this tensor's copies with ``tensor``, quantized by this tensor's quantizer. Nothing is written where ``noop_flag[0] == 1``."""
        if isinstance(tensor, QuantizedTensorStorage):
            tensor = tensor.dequantize()
        self._get_quantizer().with_usages(**self.get_usages()).update_quantized(tensor, self, noop_flag=noop_flag)
        note_written(self)
        return self

    def update_quantizer(self, quantizer: QuantizerLike) -> None:
        """Quantize by ``quantizer`` from now on; warns where that is another one."""
        if self._quantizer is None:
            raise ArgumentError(expected("a quantizer", of=type(self).__name__, got=None, do="quantize a tensor anew"))
        if self._quantizer is not quantizer:
            warnings.warn(f"the quantizer of a {type(self).__name__} is replaced: what is written to it next may have other values", stacklevel=2)
            self._quantizer = quantizer

    def operand(self, columnwise: bool) -> Any:
        """The operand of a matrix product that reads this tensor row-wise or column-wise: itself, or a tensor within."""
        return self

    def get_metadata(self) -> dict[str, Any]:
        """The fields, as the constructor takes them."""
        raise NotImplementedError

    def get_usages(self) -> dict[str, bool]:
        """Which copies are there: ``{"rowwise": ..., "columnwise": ...}``."""
        raise NotImplementedError

    def dequantize(self, *, dtype: DTypeLike | None = None) -> Any:
        """The values in ``dtype`` (default: the nominal dtype)."""
        raise NotImplementedError

    def _get_quantizer(self) -> Any:
        if self._quantizer is None:
            raise ArgumentError(expected("a quantizer", of=f"a {type(self).__name__} that is written to", got=None, do="quantize a tensor anew"))
        return self._quantizer


check_methods(QuantizedTensorStorage)


class FieldStorage(QuantizedTensorStorage):
    """A storage that declares its fields once: from the declaration follow saving, copying, moving, flattening and checkpoints.

    ``_TENSORS``: the tensors, by constructor argument and attribute, in the order in which they are saved. ``_OPTIONS``: the constructor arguments
    that say how the tensors are to be read; each attribute has an underscore before. ``_PARTS``: storages within, given like ``_TENSORS``.
    ``_ALIKE``: the argument of the values, for a format that reads a value alike wherever it lies (one scale per tensor).
    """

    _TENSORS: ClassVar[dict[str, str]] = {}
    _OPTIONS: ClassVar[tuple[str, ...]] = ()
    _PARTS: ClassVar[dict[str, str]] = {}
    _ALIKE: ClassVar[str] = ""

    @property
    def shape(self) -> Any:
        raise NotImplementedError

    @property
    def _saved_shape(self) -> Any:
        """The shape that a checkpoint records."""
        return self.shape

    @property
    def dtype(self) -> Any:
        return self._dtype

    @property
    def device(self) -> Any:
        return next(tensor for tensor in self.get_data_tensors() if tensor is not None).device

    def size(self, dim: int | None = None) -> Any:
        return size_of(self.shape, dim, type(self).__name__)

    def get_data_tensors(self) -> tuple[Any, ...]:
        """The row-wise and the column-wise data."""
        raise NotImplementedError

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Make or drop the row-wise and the column-wise copy; None leaves one as it is."""
        raise NotImplementedError

    def dequantize(self, *, dtype: DTypeLike | None = None) -> Any:
        """The values in ``dtype`` (default: the nominal dtype)."""
        return self._dequantized(dtype if dtype is not None else self._dtype)

    def _dequantized(self, dtype: DTypeLike) -> Any:
        return tex.dequantize(self, dtype)

    def get_metadata(self) -> dict[str, Any]:
        """The fields, as the constructor takes them."""
        tensors = {name: getattr(self, attribute) for name, attribute in (self._TENSORS | self._PARTS).items()}
        options = {name: getattr(self, f"_{name}") for name in self._OPTIONS}
        return {**tensors, **options, "quantizer": self._quantizer, "fake_dtype": self._dtype}

    def prepare_for_saving(self) -> tuple[list[Any], Self]:
        """``(tensors, self)`` with the tensors taken out of ``self``; ``restore_from_saved`` puts them back."""
        tensors = [getattr(self, attribute) for attribute in self._TENSORS.values()]
        for attribute in self._TENSORS.values():
            setattr(self, attribute, None)
        return tensors, self

    def restore_from_saved(self, tensors: Saved) -> list[Any]:
        """Take this storage's tensors from the front of ``tensors`` and return the rest. Raises ``ArgumentError`` where there are fewer."""
        check_saved(self, tensors)
        for attribute, tensor in zip(self._TENSORS.values(), tensors, strict=False):
            setattr(self, attribute, tensor)
        return tensors[len(self._TENSORS) :]

    def clear(self) -> None:
        """Drop the tensors."""
        for attribute in self._TENSORS.values():
            setattr(self, attribute, None)

    def copy_from_storage(self, src: Storage) -> None:
        """Copy the buffers that both have. Raises ``ArgumentError`` where ``src`` has another format or other options."""
        if not self._same_format(src):
            raise ArgumentError(expected(f"the format and options of {self!r}", of="copy_from_storage", got=repr(src), do="quantize it likewise"))
        for attribute in self._TENSORS.values():
            mine, other = getattr(self, attribute), getattr(src, attribute)
            if mine is not None and other is not None:
                mine.copy_(other)

    def _same_format(self, other: Any) -> bool:
        """Whether the buffers of ``other`` are to be read like those of ``self``."""
        return (
            isinstance(other, FieldStorage)
            and (self._TENSORS, self._OPTIONS) == (other._TENSORS, other._OPTIONS)
            and all(getattr(other, f"_{name}") == getattr(self, f"_{name}") for name in self._OPTIONS)
        )

    def _takes_bytes_of(self, other: Any) -> bool:
        """Whether copying the buffers of ``other`` gives the same as quantizing its values: ``other`` has all copies that ``self`` has, made in the
        same way."""
        if not self._same_format(other) or tuple(other.shape) != tuple(self.shape):
            return False
        pairs = [(getattr(self, attribute), getattr(other, attribute)) for attribute in self._TENSORS.values()]
        if any(mine is not None and (theirs is None or mine.shape != theirs.shape) for mine, theirs in pairs):
            return False
        return self._quantizer is None or other._quantizer is None or self._quantizer.quantizes_like(other._quantizer)

    def _mapped(self, move: Callable[[Any], Any], quantizer: Callable[[Any], Any] = lambda quantizer: quantizer) -> dict[str, Any]:
        """``get_metadata`` with ``move`` applied to every tensor, and ``quantizer`` to the quantizer."""
        fields = self.get_metadata()
        moved = {name: move(fields[name]) for name in self._TENSORS if fields[name] is not None}
        return {**fields, **moved, "quantizer": quantizer(fields["quantizer"])}

    def view(self, *shape: Any) -> Any:
        """The same data with another shape. Raises ``ShapeError`` where the format cannot be read so."""
        wanted = resolved(tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape, self.shape)
        fields = self._viewed(wanted)
        if fields is None:
            of = f"a view of a tensor of {kind_of(self)} {list(self.shape)}"
            raise ShapeError(expected("the same last dimension and number of elements", of=of, got=list(wanted), do="dequantize it first"))
        return type(self)(**fields)

    def _write_where(self, values: torch.Tensor, changed: torch.Tensor) -> None:
        """Write those ``values`` (fp32 ``[*shape]``) that have ``changed`` (bool ``[*shape]``). Blocks without one keep their bytes, where a scale of
        the whole tensor stays."""
        self._take_where(self._quantized_like(values), changed)
        note_written(self)

    def _quantized_like(self, values: torch.Tensor) -> Any:
        """``values`` with the copies that this tensor has."""
        return self._get_quantizer().with_usages(**self.get_usages()).quantize(values)

    def _take_where(self, new: Any, changed: torch.Tensor) -> None:
        """Take over the bytes of ``new`` at least where ``changed``."""
        self.copy_from_storage(new)

    def _viewed(self, shape: tuple[int, ...]) -> dict[str, Any] | None:
        """The fields of a view of ``shape``, or None where there is none that is quantized."""
        return None

    def _fits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of ``shape`` can have this format."""
        return True

    def _row_step(self) -> int:
        """The data can be divided at multiples of this number of rows."""
        return 1

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        """The attributes that are gathered from the shards of a tensor. A copy that can be made from another one is not gathered."""
        raise NotImplementedError

    def fsdp_extract_buffers(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(buffers, meta)``: buffers whose first dimension divides as the tensor's first dimension does, without padding."""
        raise NotImplementedError

    def fsdp_assign_gathered(self, gathered: Buffers, meta: Extracted) -> None:
        """Take buffers that were gathered along their first dimensions, or divided along them; copies that were not among them are dropped."""
        fields = whole_fields(self, gathered, meta)
        for name, attribute in self._TENSORS.items():
            setattr(self, attribute, fields.get(name))

    def _of_rows(self, buffers: Sequence[Any], meta: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The shape and the tensors, by argument, of a tensor with the rows ``buffers``: the inverse of ``fsdp_extract_buffers``."""
        raise NotImplementedError

    def _check_buffers(self, shape: tuple[int, ...]) -> str | None:
        """Why the tensors cannot be those of a tensor of ``shape``, or None."""
        return None

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        """The attributes that are tensors, and what else makes this tensor."""
        attributes = [name for name in (*self._TENSORS.values(), *self._PARTS.values()) if getattr(self, name) is not None]
        fields = self.get_metadata()
        others = {name: value for name, value in fields.items() if name not in self._TENSORS and name not in self._PARTS}
        is_tensor = isinstance(self, torch.Tensor)
        requires_grad = is_tensor and self.requires_grad
        return attributes, {"cls": type(self), "is_tensor": is_tensor, "requires_grad": requires_grad, "nontensor_kwargs": others}

    @staticmethod
    def __tensor_unflatten__(inner_tensors: dict[str, Any], ctx: dict[str, Any], outer_size: Any, outer_stride: Any) -> Any:
        """The tensor that was flattened, of other inner tensors."""
        cls, others = ctx["cls"], ctx["nontensor_kwargs"]
        tensors = {name: inner_tensors.get(attribute) for name, attribute in (cls._TENSORS | cls._PARTS).items()}
        if not ctx["is_tensor"]:
            return cls(**tensors, **others)
        return cls(tuple(outer_size), others["fake_dtype"], requires_grad=ctx["requires_grad"], stride=outer_stride, **tensors, **others)

    def __copy__(self) -> Self:
        return type(self)(**self.get_metadata())


def note_written(storage: Any) -> None:
    """Increment the version counters of the data of ``storage``. Kernels write to it without torch's knowledge, and a backward that still needs the
    old data must raise."""
    data = storage.get_data_tensors() if hasattr(storage, "get_data_tensors") else ()
    increment_version([tensor for tensor in data if isinstance(tensor, torch.Tensor) and not tensor.is_inference()])
    if hasattr(storage, "_writes"):
        current = not storage._transpose_invalid
        storage._writes[0] += 1
        if current:
            note_current(storage)


def note_current(storage: Any) -> None:
    """Note that the transposed data of ``storage`` is that of its data now. All tensors that share the two see it (``share_notes``)."""
    if isinstance(storage._transpose, torch.Tensor):
        storage._writes[_memory(storage._transpose)] = storage._writes[0]


def share_notes(storage: Any, other: Any) -> None:
    """Let ``storage``, which lies in the memory of ``other``, know when either is written."""
    if hasattr(other, "_writes"):
        storage._writes = other._writes


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if type(tensor) is torch.Tensor and not tensor.is_meta else -1


def kind_of(storage: Any) -> str:
    """The name of a storage's format, for messages."""
    return type(storage).__name__.removesuffix("Storage")


class Float8TensorStorage(FieldStorage):
    """One scale for the whole tensor: value = ``_data`` read as ``_fp8_dtype``, times ``_scale_inv``.

    ``_data``: uint8, the tensor's shape, row-wise; ``_transpose``: uint8 ``[last, *leading]``, column-wise; at least one of them is there.
    ``_scale_inv``: fp32 ``[1]``. The fields are real tensors of any device, or lazy ones.
    """

    _FORMAT: ClassVar[Format] = FLOAT8
    _TENSORS: ClassVar[dict[str, str]] = {"data": "_data", "data_transpose": "_transpose", "fp8_scale_inv": "_scale_inv"}
    _OPTIONS = ("fp8_dtype",)
    _ALIKE = "data"

    _data: Any
    _transpose: Any
    _writes: dict[int, int]
    """How often the data has been written, by all that share it (key 0), and by the memory of a transpose at which of the writes it was made."""
    _scale_inv: Any
    _fp8_dtype: Any

    def __init__(
        self,
        *,
        data: Array | None,
        fp8_scale_inv: Array,
        fp8_dtype: DType,
        fake_dtype: torch.dtype | None = None,
        data_transpose: Array | None = None,
        quantizer: Any = None,
    ) -> None:
        self._data = data
        self._transpose = data_transpose
        self._invalid = data_transpose is None
        self._writes = {0: 0}
        self._scale_inv = fp8_scale_inv
        self._fp8_dtype = fp8_dtype
        self._dtype = fake_dtype
        self._quantizer = quantizer

    @property
    def _transpose_invalid(self) -> bool:
        """Whether the transposed data is out of date: said to be, or the data alone has been written since, by a tensor that shares it (a part, what
        ``detach`` gives) and has no transposed data."""
        if self._invalid or not self._writes[0] or not isinstance(self._transpose, torch.Tensor):
            return self._invalid
        return self._writes.get(_memory(self._transpose), 0) != self._writes[0]

    @_transpose_invalid.setter
    def _transpose_invalid(self, value: bool) -> None:
        self._invalid = value
        if not value and self._writes[0]:
            note_current(self)

    @property
    def shape(self) -> tuple[int, ...]:
        if self._data is not None:
            return tuple(self._data.shape)
        assert self._transpose is not None
        last, *leading = self._transpose.shape
        return (*leading, last)

    @property
    def device(self) -> Any:
        return self._scale_inv.device

    def get_usages(self) -> dict[str, bool]:
        return {"rowwise": self._data is not None, "columnwise": self._transpose is not None and not self._transpose_invalid}

    def get_data_tensors(self) -> tuple[Any, Any]:
        return self._data, self._transpose

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Make or drop the row-wise and the column-wise copy; None leaves one as it is. The last copy cannot be dropped."""
        has = self.get_usages()
        rowwise = has["rowwise"] if rowwise_usage is None else rowwise_usage
        columnwise = has["columnwise"] if columnwise_usage is None else columnwise_usage
        if not (rowwise or columnwise):
            raise ArgumentError(expected("at least one usage", of="a Float8 tensor", got="neither row-wise nor column-wise", do="keep one"))
        if rowwise and self._data is None:
            self._data = _untransposed(self._transpose, self._fp8_dtype)
        if columnwise and not has["columnwise"]:
            self._transpose = tex.fp8_transpose(self._data, self._fp8_dtype, out=None)
            self._transpose_invalid = False
        if not rowwise:
            self._data = None
        if not columnwise:
            self._transpose, self._transpose_invalid = None, True

    def get_metadata(self) -> dict[str, Any]:
        """The fields, as the constructor takes them: without a transpose that is out of date."""
        fields = super().get_metadata()
        return {**fields, "data_transpose": None} if self._transpose_invalid else fields

    def clear(self) -> None:
        """Drop the data."""
        self._data = self._transpose = None
        self._transpose_invalid = True

    def copy_from_storage(self, src: Storage) -> None:
        columnwise = src.get_usages()["columnwise"]  # before the write, as the two may share their memory
        super().copy_from_storage(src)
        if hasattr(self._quantizer, "take_state_of") and type(src._quantizer) is type(self._quantizer):
            self._quantizer.take_state_of(src._quantizer)
        self._writes[0] += 1
        if self._transpose is not None:
            self._transpose_invalid = not columnwise

    def _viewed(self, shape: tuple[int, ...]) -> dict[str, Any] | None:
        # One scale serves every shape; but the transpose of another last dimension is another one, and a tensor's copies must not fall apart.
        fields, have = self.get_metadata(), self.shape
        same_last = bool(shape) and bool(have) and shape[-1] == have[-1]
        if torch.Size(shape).numel() != torch.Size(have).numel() or (fields["data_transpose"] is not None and not same_last):
            return None
        try:
            if fields["data"] is not None:
                fields["data"] = viewed(fields["data"], shape)
            if (transpose := fields["data_transpose"]) is not None:
                fields["data_transpose"] = viewed(transpose, (*shape[-1:], *shape[:-1]))
        except RuntimeError:  # a part that has gaps
            return None
        return fields

    def fsdp_buffer_fields(self) -> tuple[str, ...]:
        return ("_data",) if self._data is not None else ("_transpose",)

    def fsdp_extract_buffers(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = self.fsdp_buffer_fields()
        buffer = self._data if names == ("_data",) else self._transpose.movedim(0, -1).contiguous()
        return (buffer,), {"field_names": names, "kept": {"fp8_scale_inv": self._scale_inv}}

    def _of_rows(self, buffers: Sequence[Any], meta: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
        (buffer,) = buffers
        rowwise = meta["field_names"] == ("_data",)
        data = {"data": buffer} if rowwise else {"data_transpose": buffer.movedim(-1, 0).contiguous()}
        return tuple(buffer.shape), {**data, **meta["kept"]}

    def fsdp_assign_gathered(self, gathered: Buffers, meta: Extracted) -> None:
        super().fsdp_assign_gathered(gathered, meta)
        self._transpose_invalid = self._transpose is None

    def _check_buffers(self, shape: tuple[int, ...]) -> str | None:
        wanted = {"data": (shape, torch.uint8), "data_transpose": ((*shape[-1:], *shape[:-1]), torch.uint8), "fp8_scale_inv": ((1,), torch.float32)}
        lacks = "no data" if self._data is None and self._transpose is None else "no scale" if self._scale_inv is None else None
        return wrong_buffer(self, wanted) or lacks

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._fp8_dtype.name.removeprefix('kFloat8')}, shape={list(self.shape)}, dtype={self._dtype})"


def detached(x: Any) -> Any:
    """A new tensor object without autograd over the data of a torch tensor; a lazy tensor itself, as it has no autograd."""
    return x.detach() if isinstance(x, torch.Tensor) else x


def wrong_buffer(storage: FieldStorage, wanted: dict[str, tuple[Sequence[int], torch.dtype]]) -> str | None:
    """The first tensor of a storage with a wrong shape or dtype, in words; None where all are right."""
    for name, (shape, dtype) in wanted.items():
        buffer = getattr(storage, storage._TENSORS[name])
        if buffer is not None and (tuple(buffer.shape) != tuple(shape) or buffer.dtype is not dtype):
            return f"{name} of {buffer.dtype} {list(buffer.shape)}, not {dtype} {list(shape)}"
    return None


def _untransposed(transpose: Array, fp8_dtype: DType) -> Any:
    last, *leading = transpose.shape
    flat = tex.prim.reshape(transpose, (last, -1 if 0 not in transpose.shape else 0))
    return tex.prim.reshape(tex.fp8_transpose(flat, fp8_dtype, out=None), (*leading, last))
