"""Quantized tensors that are torch tensors: they stand wherever a tensor stands, and dequantize for whatever does not know them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from fusible.errors import ArgumentError, DTypeError, ShapeError, expected
from fusible.quantized.arguments import (
    Buffers,
    DTypeLike,
    GatherInput,
    Mesh,
    NoopFlag,
    Parts,
    Shard,
    Sizes,
    Source,
    Storage,
    check_methods,
)
from fusible.quantized.collectives import share_first_scale
from fusible.quantized.first_scale import of_a_copy
from fusible.quantized.gathered import gathered_fields
from fusible.quantized.parts import Part, PartOfValues, check_writes, of_values, write_part
from fusible.quantized.saving import rebuild, reduced
from fusible.quantized.storage import FieldStorage, note_current, share_notes
from fusible.quantized.tensor_operations import FLOATS, HANDLERS, on_values

__all__ = ["QuantizedTensor", "recorded_amax"]

_aten = torch.ops.aten
_OF_STORAGE: dict[Any, Any] = {}

if TYPE_CHECKING:
    _Storage = FieldStorage  # which each subclass has for its other base
else:
    _Storage = object


class QuantizedTensor(torch.Tensor, _Storage):
    """Base of the quantized tensors: a ``torch.Tensor`` of a nominal dtype over the fields of a storage, which a subclass names as its other base.

    ``detach``, ``clone``, ``.to(device)``, ``new_empty``, ``empty_like``, ``new_zeros``, rows cut at whole blocks (of a tensor of one scale, any
    part: ``split``, ``chunk``, ``select``, slices with a step), and views that keep the last dimension are quantized, without loss. ``new_zeros`` of
    some of the rows, which is how FSDP2 makes a shard, raises ``ShapeError`` unless they are an even part in whole blocks. ``copy_`` from a tensor of
    the same format and options copies bytes, else it quantizes. An operation that writes dequantizes, computes and quantizes again; so optimizers
    work, whose moments (``zeros_like``) are not quantized. Every other operation sees the dequantized values.

    A view and ``detach`` share the buffers, and so does a part of a tensor of one scale: what is written to it lands in the tensor. A part of a
    tensor in blocks is a copy, as is what looks like a view and shows the dequantized values (``t()``): writing to it raises ``ValuesError``, and
    ``clone`` gives one that may be written. ``t[2:4] = values``, by any index, lands in every format; blocks without a written element keep their
    bytes, where the scale of the whole tensor stays. A transposed copy that one of two tensors sharing buffers lacks is out of date in the other
    when that one is written (``get_usages``); of other formats, a copy that one has dropped is not written by it.
    """

    _STORAGE: ClassVar[Any] = None
    _dtype: torch.dtype
    _quantizer: Any
    _undivided = False
    _part: Part | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_STORAGE" not in vars(cls):
            cls._STORAGE = next((base for base in cls.__mro__ if issubclass(base, FieldStorage) and not issubclass(base, torch.Tensor)), None)
            _OF_STORAGE.setdefault(cls._STORAGE, cls)

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        requires_grad: bool = False,
        device: Any = None,
        stride: Any = None,
        fake_dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> Self:
        if fake_dtype is not None and fake_dtype is not dtype:
            raise ArgumentError(expected(f"{dtype}", of=f"fake_dtype of a {cls.__name__}", got=fake_dtype, do="pass the same as dtype"))
        if device is None:
            device = next(field.device for field in fields.values() if isinstance(field, (torch.Tensor, FieldStorage)))
        strides: dict[str, Any] = {} if stride is None else {"strides": tuple(stride)}
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device, requires_grad=requires_grad, **strides)

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        requires_grad: bool = False,
        device: Any = None,
        stride: Any = None,
        fake_dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        self._STORAGE.__init__(self, fake_dtype=dtype, **fields)

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            check_writes(func, args, kwargs)
        if PartOfValues in types:
            args, kwargs = of_values(args), of_values(kwargs)
        if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False):  # autograd gives a view the version of what it is a view of, which an inference tensor cannot have
                return cls.__torch_dispatch__(func, types, args, kwargs)
        handler = HANDLERS.get(func)
        if func is _aten.copy_.default and getattr(args[0], "_part", None) is not None:
            return write_part(args[0], args[1])
        if func is _aten.copy_.default and not isinstance(args[0], QuantizedTensor):
            into, source, *options = args
            return into.copy_(source._dequantized(into.dtype if into.dtype in FLOATS else source.dtype), *options)
        if handler is not None and isinstance(args[0], QuantizedTensor):
            result = handler(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return on_values(func, args, kwargs)

    def dequantize(self, *, dtype: DTypeLike | None = None) -> torch.Tensor:
        """The values in ``dtype`` (default: the nominal dtype). Differentiable: the gradient passes through."""
        dtype = dtype if dtype is not None else self._dtype
        if self.requires_grad and torch.is_grad_enabled():
            return _Dequantize.apply(self, dtype)  # pyright: ignore[reportReturnType]
        return self._dequantized(dtype)

    def quantize_(self, tensor: Source, *, noop_flag: NoopFlag | None = None) -> Self:
        """Overwrite this tensor with ``tensor``, quantized; nothing where ``noop_flag[0] == 1``. A part is written by the scale of its tensor, and
        raises ``ValuesError`` where it is a copy."""
        return super().quantize_(tensor, noop_flag=noop_flag) if self._part is None else write_part(self, tensor, noop_flag)

    def copy_from_storage(self, src: Storage) -> None:
        if self._part is None:
            super().copy_from_storage(src)
        else:
            write_part(self, src)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write ``value`` to a part, of every format: blocks of which it is no part keep their bytes, where the scale of the whole tensor stays."""
        with torch.no_grad():
            part = self.detach()[index]
        if isinstance(part, QuantizedTensor) and (part._part is None or part._part.whole is not None):
            return super().__setitem__(index, value)
        places, values = torch.zeros(self.shape, dtype=torch.bool, device=self.device), torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        places[index], values[index] = True, value
        self.index_put_((places,), values[places])

    @classmethod
    def __metadata_guard__(cls, compiled: dict[str, Any], now: dict[str, Any]) -> bool:
        """Whether a ``torch.compile`` program that was compiled for one tensor serves another, given what ``__tensor_flatten__`` returned for both.
        Quantizers with state, as those of delayed scaling, are compared by their options, not by their state."""
        (one, first), (other, second) = (_without_quantizer(metadata) for metadata in (compiled, now))
        if one is None or other is None or one == other:
            return first == second and one == other
        return first == second and one.get_usages() == other.get_usages() and one.quantizes_like(other)

    @staticmethod
    def over(storage: Any, dtype: torch.dtype) -> QuantizedTensor:
        """The tensor of a nominal ``dtype`` over the fields of a bare storage. Raises ``ArgumentError`` for a storage that has no tensor."""
        found = _OF_STORAGE.get(type(storage))
        if found is None:
            do = "quantize with internal=False"
            raise ArgumentError(expected("a storage of a format that has a tensor", of="QuantizedTensor.over", got=type(storage).__name__, do=do))
        return found(tuple(storage.shape), dtype, **{**storage.get_metadata(), "fake_dtype": dtype})

    def storage_without_autograd(self) -> Any:
        """The same data as a bare storage."""
        return self._STORAGE(**self.get_metadata())

    def untyped_storage(self) -> torch.UntypedStorage:
        """An empty storage: the bytes lie in the inner tensors."""
        return torch.UntypedStorage(0, device=self.device)

    @property
    def data(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """This tensor detached from autograd. Assigning a tensor of the same class takes over its fields; any other tensor is quantized into this
        one."""
        return torch.Tensor.data.__get__(self)  # pyright: ignore[reportAttributeAccessIssue]

    @data.setter
    def data(self, tensor: Source) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise DTypeError(expected("a tensor", of=f"data of a {type(self).__name__}", got=type(tensor).__qualname__, do="pass one"))
        if type(tensor) is type(self):
            torch.Tensor.data.__set__(self, tensor)  # pyright: ignore[reportAttributeAccessIssue]
            self._adopt(tensor.get_metadata())
        elif tuple(tensor.shape) != tuple(self.shape):
            raise ShapeError(expected(str(list(self.shape)), of=f"data of a {type(self).__name__}", got=list(tensor.shape), do="pass that shape"))
        else:
            with torch.no_grad():
                self.quantize_(tensor)

    def _adopt(self, fields: dict[str, Any]) -> None:
        self._part = None
        self._STORAGE.__init__(self, **fields)

    def _made(self, shape: Sequence[int], fields: dict[str, Any], *, requires_grad: bool = False, **options: Any) -> Self:
        """A tensor of this class with other fields."""
        return type(self)(shape, fields["fake_dtype"], requires_grad=requires_grad, **fields, **options)  # pyright: ignore[reportCallIssue]

    def _like(self, *, requires_grad: bool) -> Self:
        return self._made(self.shape, self.get_metadata(), requires_grad=requires_grad, device=self.device)._over(self, self._part)

    def _over(self, other: Any, part: Part | None) -> Self:
        """This tensor, which lies in the memory of ``other``, as a part."""
        share_notes(self, other)
        self._part = part
        return self

    @classmethod
    def make_like(cls, tensor: Storage, *, shape: Sizes | None = None, dtype: torch.dtype | None = None, requires_grad: bool = False) -> Any:
        """A tensor over the same fields as ``tensor``, perhaps of another nominal shape or dtype. Raises ``ShapeError`` for another number of
        elements."""
        if shape is not None and torch.Size(shape).numel() != tensor.numel():
            of = f"shape of {cls.__name__}.make_like"
            raise ShapeError(expected(f"as many elements as {list(tensor.shape)} has", of=of, got=list(shape), do="quantize a tensor of that shape"))
        size, fields = tuple(shape or tensor.shape), {**tensor.get_metadata(), "fake_dtype": dtype or tensor.dtype}
        made, part = tensor._made(size, fields, requires_grad=requires_grad, device=tensor.device), getattr(tensor, "_part", None)
        return made._over(tensor, part if part is None or part.whole is None else part.then(lambda y: y.view(size)))

    def __copy__(self) -> Self:
        return self._like(requires_grad=self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            got = "a result of differentiable operations"
            raise ArgumentError(expected("a leaf", of=f"deepcopy of a {type(self).__name__}", got=got, do="detach it first"))
        fields = self._mapped(lambda tensor: deepcopy(tensor, memo), lambda quantizer: deepcopy(quantizer, memo))
        copied = memo[id(self)] = self._made(self.shape, fields, requires_grad=self.requires_grad, device=self.device)
        for name, value in vars(self).items():
            if name not in vars(copied):
                setattr(copied, name, deepcopy(value, memo))
        if self.grad is not None:
            copied.grad = deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Plain tensors and JSON: so ``torch.load(weights_only=True)`` reads it. Raises ``CheckpointError`` for a quantizer that JSON cannot tell."""
        return rebuild, reduced(self)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype | None, device: torch.device | str | None, pin_memory: bool) -> Any:
        """A tensor of this format with unspecified values, or NotImplemented where ``shape`` or ``dtype`` cannot have it."""
        dtype, device = dtype or self.dtype, device or self.device
        if self._quantizer is None or dtype not in FLOATS or not self._fits(shape):
            return NotImplemented
        quantizer = self._quantizer.with_usages(**self.get_usages())
        made = quantizer.make_empty(shape, dtype=dtype, device=device, pin_memory=bool(pin_memory))
        made._quantizer = of_a_copy(self._quantizer)
        return made

    def _of_values(self, data: torch.Tensor | None, cut: Callable[[torch.Tensor], torch.Tensor], moves: bool = True) -> Any:
        """The part that ``cut`` gives, of a format that reads a value alike wherever it lies, over this tensor's memory. ``data``: what it gives of
        the values. What has all of them where they lie is no part."""
        fields = self.get_metadata()
        if data is not None and _lies_as(data, fields[self._ALIKE]):
            return self._like(requires_grad=False)
        fields[self._ALIKE] = data
        columns = cut(torch.movedim(fields["data_transpose"], 0, -1)) if fields.get("data_transpose") is not None and moves else None
        if "data_transpose" in fields:
            fields["data_transpose"] = columns if columns is None else columns.movedim(-1, 0)
        shape = next(part.shape for part in (data, columns) if part is not None)
        part = Part(self, cut, moves) if self._part is None else self._part.then(cut, moves)
        return self._made(shape, fields, device=self.device)._over(self, part)

    def _rows(self, start: int, stop: int) -> Any:
        """Rows ``start`` to ``stop`` of the first dimension: this tensor, a quantized copy, which is nobody's part, or None where blocks would be
        cut."""
        first, *inner = self.shape
        if start == 0 and stop == first:
            return self._like(requires_grad=False)
        step, per_index = self._row_step(), torch.Size(inner[:-1]).numel()
        if start >= stop or not inner or any(rows * per_index % step for rows in (start, stop, first)):
            return None
        try:
            buffers, meta = self.fsdp_extract_buffers()
        except ArgumentError:
            return None  # scales in the order of a product, or of rows that divide otherwise: then the values divide
        parts = [buffer[start * len(buffer) // first : stop * len(buffer) // first].clone() for buffer in buffers]
        shape, fields = self._of_rows(parts, _apart(meta))
        return self._gathered(shape, fields, self.dtype, of_a_copy(self._quantizer), self.get_usages())

    def _gathered(self, shape: Sequence[int], fields: dict[str, Any], dtype: torch.dtype, quantizer: Any, usages: dict[str, bool]) -> Self:
        """The tensor of gathered or divided rows, with the copies that ``usages`` names."""
        absent = dict.fromkeys(self._TENSORS)
        fields = {**self.get_metadata(), **absent, **fields, "quantizer": quantizer, "fake_dtype": dtype}
        made = self._made(shape, fields)
        made.update_usage(rowwise_usage=usages["rowwise"], columnwise_usage=usages["columnwise"])
        return made

    def fsdp_pre_all_gather(self, mesh: Mesh | None, orig_size: Any, contiguous_orig_stride: Any, module: Any, mp_policy: Any) -> tuple[Any, Any]:
        """``(buffers, metadata)`` of this shard, for FSDP2, which gathers the quantized bytes.

        From now on the shards are quantized by a common amax, where the quantizer can reduce one. Two kinds of tensors are gathered beside the bytes:
        what the bytes are read by (scales), so that the shards can be compared; and the amax that a delayed-scaling quantizer has recorded, of which
        all shards take the largest, as their next scales follow from it.
        """
        quantizer = self._quantizer
        if mesh is not None:
            self._reduce_amaxes(mesh)
        buffers, meta = self.fsdp_extract_buffers()
        common = [value.reshape(1) for value in _common(meta) if value.numel() == 1]
        recorded = [amax.reshape(1)] if (amax := recorded_amax(quantizer)) is not None else []
        given, alone = (*buffers, *common, *recorded), mesh is not None and mesh.size() == 1
        # Alone FSDP2 takes the first tensor and leaves out the others.
        return given[:1] if alone else given, (meta, self.get_usages(), len(buffers), len(common), given[1:] if alone else ())

    def _reduce_amaxes(self, mesh: Any) -> None:
        """Quantize from now on by the largest magnitude in all processes of ``mesh``, where one says how."""
        quantizer = self._quantizer
        first = getattr(quantizer, "first_scale", None)
        if first is not None and not first.observed and mesh.size() > 1:
            share_first_scale(self, mesh.get_group())
        if hasattr(quantizer, "with_amax_reduction") and not quantizer.with_amax_reduction:
            self._quantizer = quantizer.copy()
            self._quantizer.with_amax_reduction, self._quantizer.amax_reduction_group = True, mesh.get_group()

    def fsdp_post_all_gather(
        self, all_gather_outputs: Buffers, metadata: GatherInput, param_dtype: torch.dtype, *, out: Shard | None = None
    ) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """The whole tensor of the gathered buffers, and the tensors that FSDP2 may free after use; written to ``out`` where it is given. Copies
        of what is gathered that are made here, such as the column-wise one, are among them: what a backward has kept of them is written anew, too.

        Raises ``ArgumentError`` where the shards have different scales. This is checked the first time only: the check waits for the device, and
        shards with equal scales keep them equal.
        """
        meta, usages, count, common, own = metadata
        of, freed = "all_gather_outputs of fsdp_post_all_gather", all_gather_outputs
        all_gather_outputs = *all_gather_outputs, *own
        buffers, scales, recorded = all_gather_outputs[:count], all_gather_outputs[count : count + common], all_gather_outputs[count + common :]
        amax, given = recorded_amax(self._quantizer), (*all_gather_outputs, *_common(meta))
        if len(buffers) + len(scales) != count + common or len(recorded) != (amax is not None):
            wanted = f"{count + common + (amax is not None)} tensors"
            raise ShapeError(expected(wanted, of=of, got=len(all_gather_outputs), do="pass what fsdp_pre_all_gather gave, gathered"))
        if out is None:
            if any(bool((values != values[0]).any()) for values in scales):
                got, do = "several", "make or load the parameters alike in all processes before they are shared out"
                raise ArgumentError(expected("one scale", of=f"the shards of a {type(self).__name__}", got=got, do=do))
            shape, fields = gathered_fields(self, buffers, meta, of)
            out = self._gathered(shape, fields, param_dtype, self._quantizer.copy(), usages)
            freed = *freed, *(getattr(*at) for at in _tensors_of(out).values() if not _is_one_of(getattr(*at), given))
        else:
            former = {name: getattr(*at) for name, at in _tensors_of(out).items()}
            out.fsdp_assign_gathered(buffers, meta)
            out.update_usage(rowwise_usage=usages["rowwise"], columnwise_usage=usages["columnwise"])
            for name, (holder, attribute) in _tensors_of(out).items():
                tensor = getattr(holder, attribute)
                if name in former and not _is_one_of(tensor, given):
                    former[name].data.copy_(tensor)  # .data: nobody's version changes
                    setattr(holder, attribute, former[name])
                    if hasattr(holder, "_writes"):
                        note_current(holder)
        if amax is not None:
            amax.copy_(recorded[0].amax())
        return out, freed

    @staticmethod
    def joined(parts: Parts) -> QuantizedTensor | None:
        """The concatenation of ``parts`` along the first dimension, by their bytes; None where their formats or scales differ, or blocks are cut."""
        first = parts[0]
        if any(type(part) is not type(first) or not first._same_format(part) or part.get_usages() != first.get_usages() for part in parts):
            return None
        try:
            found = [part.fsdp_extract_buffers() for part in parts]
        except ArgumentError:
            return None
        metas = [meta for _, meta in found]
        if any(len(_common(meta)) != len(_common(metas[0])) or not all(map(torch.equal, _common(meta), _common(metas[0]))) for meta in metas):
            return None
        shape, fields = first._of_rows([torch.cat(buffers) for buffers in zip(*(buffers for buffers, _ in found), strict=True)], metas[0])
        quantizer = copy(of_a_copy(first._quantizer))
        amaxes = [amax for part in parts if (amax := recorded_amax(part._quantizer)) is not None]
        if amaxes:
            quantizer.amax = torch.stack(amaxes).amax(dim=0)
        return first._gathered(shape, fields, first.dtype, quantizer, first.get_usages())

    def __get_tensor_shard__(self, index: Any) -> Self:
        """The tensor that ``torch.distributed.checkpoint`` reads into: this one, undivided, since writing to a part of it would change nothing
        here."""
        whole = self._like(requires_grad=False)
        whole._undivided = True
        return whole

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        element = next((getattr(self, f"_{name}") for name in self._OPTIONS if name in ("fp8_dtype", "fp4_dtype")), None)
        told = f"{element.name.removeprefix('kFloat8').removeprefix('kFloat4')}, " if element is not None else ""
        return f"{type(self).__name__}({told}data={self._dequantized(self.dtype)})"


check_methods(QuantizedTensor)


def recorded_amax(quantizer: Any) -> torch.Tensor | None:
    """The amax tensor of a delayed-scaling quantizer; None of any other quantizer."""
    amax = getattr(quantizer, "amax", None)
    return amax if isinstance(amax, torch.Tensor) and isinstance(getattr(quantizer, "scale", None), torch.Tensor) else None


def _tensors_of(x: Any, inside: str = "") -> dict[str, tuple[Any, str]]:
    """Where the tensors of ``x`` and of its parts are, by name: of what an attribute."""
    found = {f"{inside}{name}": (x, name) for name in x._TENSORS.values() if getattr(x, name) is not None}
    for name in x._PARTS.values():
        found |= _tensors_of(getattr(x, name), f"{inside}{name}.") if getattr(x, name) is not None else {}
    return found


def _is_one_of(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    """Whether a tensor lies in the memory of one of ``others``."""
    return tensor.untyped_storage().data_ptr() in {other.untyped_storage().data_ptr() for other in others}


def _common(meta: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that every shard needs to read its rows (scales), from the metadata of ``fsdp_extract_buffers``."""
    return [*meta.get("kept", {}).values(), *(value for _, inner, *_ in meta.get("parts", {}).values() for value in _common(inner))]


def _apart(meta: dict[str, Any]) -> dict[str, Any]:
    """The metadata with scales of its own: what is written to some rows leaves others as they are."""
    kept = {name: value.clone() for name, value in meta.get("kept", {}).items()}
    parts = {name: (kind, _apart(inner), *more) for name, (kind, inner, *more) in meta.get("parts", {}).items()}
    return {**meta, **({"kept": kept} if kept else {}), **({"parts": parts} if parts else {})}


def _without_quantizer(metadata: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    others = dict(metadata["nontensor_kwargs"])
    return others.pop("quantizer", None), {**metadata, "nontensor_kwargs": others}


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor._dequantized(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


def _lies_as(data: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether ``data``, over the memory of ``own``, has the same elements in the same order."""
    return data.shape == own.shape and data.stride() == own.stride() and data.storage_offset() == own.storage_offset()
