"""What torch's operations do with quantized tensors: some know the formats, the others see the values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from fusible.errors import ArgumentError, CheckpointError, ShapeError, ValuesError, expected
from fusible.quantized.collectives import by_bytes, finished, is_collective, sent
from fusible.quantized.first_scale import of_a_copy
from fusible.quantized.parts import COPY, PartOfValues, written
from fusible.quantized.shapes import resolved

if TYPE_CHECKING:
    from fusible.quantized.tensor import QuantizedTensor

__all__ = ["FLOATS", "HANDLERS", "on_values"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_aten = torch.ops.aten


def _quantized(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and hasattr(x, "_dequantized")


def on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the dequantized values, and quantize what it wrote."""
    quantized = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if _quantized(leaf)}
    if by_bytes(func, args):
        return sent(func, args, kwargs)
    try:
        plain = {key: tensor._dequantized(tensor.dtype) for key, tensor in quantized.items()}
    except ArgumentError as error:
        raise ValuesError(str(error)) from error
    result = func(*tree_map(lambda a: plain.get(id(a), a), args), **tree_map(lambda a: plain.get(id(a), a), kwargs))
    if not func._schema.is_mutable and not is_collective(func):
        return _refusing(args[0], plain.get(id(args[0])), result) if func.is_view else result
    for leaf in _written(func, args, kwargs, result):
        if _quantized(leaf):
            leaf.quantize_(plain[id(leaf)])
    originals = {id(values): quantized[key] for key, values in plain.items()}
    return tree_map(lambda r: originals.get(id(r), r), result)


def _written(func: Any, args: Any, kwargs: Any, result: Any) -> list[Any]:
    """What an operation has written to, when it has."""
    if not is_collective(func):
        return written(func, args, kwargs)
    finished(result)
    return tree_leaves(args[0])


def _refusing(x: Any, values: torch.Tensor | None, views: Any) -> Any:
    """What looks like views of a quantized tensor and are views of its dequantized values: they refuse to be written to, unless these are its own."""
    if values is None or any(_lies_in(values, own) for own in x.get_data_tensors()):
        return views
    return tree_map(lambda view: PartOfValues(view, type(x).__name__) if type(view) is torch.Tensor and view.numel() else view, views)


def _lies_in(values: torch.Tensor, own: Any) -> bool:
    return own is not None and type(values) is type(own) is torch.Tensor and values.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()


def _detach(func: Any, x: QuantizedTensor) -> Any:
    return x._like(requires_grad=False)


def _clone(func: Any, x: QuantizedTensor, *, memory_format: Any = None) -> Any:
    return x._made(x.shape, x._mapped(torch.clone, of_a_copy), device=x.device)


def _copy(func: Any, x: QuantizedTensor, source: Any, non_blocking: bool = False) -> Any:
    if _quantized(source) and x._takes_bytes_of(source):
        x.copy_from_storage(source)
    else:
        source = source if isinstance(source, torch.Tensor) else torch.tensor(source, dtype=x.dtype, device="cpu")
        # What copy_ takes is more than what a quantizer takes: any device, any type, any shape that expands.
        values = source._dequantized(source.dtype) if _quantized(source) else source
        values = values.to(device=x.device, dtype=values.dtype if values.dtype in FLOATS else x.dtype, non_blocking=non_blocking)
        x.quantize_(values if tuple(values.shape) == tuple(x.shape) else values.expand(x.shape))
    return x


def _to_copy(
    func: Any, x: QuantizedTensor, *, dtype: Any = None, device: Any = None, non_blocking: bool = False, pin_memory: bool = False, **layout: Any
) -> Any:
    if dtype is not None and dtype is not x.dtype:
        return x._dequantized(dtype if dtype in FLOATS else x.dtype).to(dtype=dtype, device=device, non_blocking=non_blocking)
    device = x.device if device is None else torch.device(device)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(device=device, non_blocking=non_blocking, copy=True)
        return moved.pin_memory() if pin_memory else moved

    return x._made(x.shape, x._mapped(move, of_a_copy), device=device)


def _new_empty(func: Any, x: QuantizedTensor, size: Any, *, dtype: Any = None, device: Any = None, pin_memory: bool = False, **layout: Any) -> Any:
    return x._empty(size, dtype, device, pin_memory)


def _empty_like(func: Any, x: QuantizedTensor, *, dtype: Any = None, device: Any = None, pin_memory: bool = False, **layout: Any) -> Any:
    return x._empty(x.shape, dtype, device, pin_memory)


def _new_zeros(func: Any, x: QuantizedTensor, size: Any, *, dtype: Any = None, device: Any = None, pin_memory: bool = False, **layout: Any) -> Any:
    _check_shard(x, size)
    made = x._empty(size, dtype, device, pin_memory)
    return made if made is NotImplemented else made.quantize_(torch.zeros(made.shape, dtype=made.dtype, device=made.device))


def _check_shard(x: QuantizedTensor, size: Sequence[int]) -> None:
    """Refuse fewer rows of the same width that cut blocks, or do not divide the tensor evenly: so FSDP2 makes a shard, which it would fill with
    values that are no longer in 8 bits, or are rounded once more."""
    rows, *inner = size or (0,)
    if len(size) < 2 or tuple(inner) != tuple(x.shape[1:]) or not 0 < rows < x.shape[0]:
        return
    step = x._row_step()
    if rows * torch.Size(inner[:-1]).numel() % step or x.shape[0] % rows:
        of, do = f"a shard of a {type(x).__name__} {list(x.shape)}", "share it out among fewer processes, or hold it in high precision"
        raise ShapeError(expected(f"an even part in whole blocks of {step} rows" if step > 1 else "an even part", of=of, got=list(size), do=do))


def _zeros_like(func: Any, x: QuantizedTensor, *, dtype: Any = None, device: Any = None, **layout: Any) -> Any:
    return torch.zeros(x.shape, dtype=dtype or x.dtype, device=device or x.device)


def _view(func: Any, x: QuantizedTensor, size: Sequence[int], *strides: Any) -> Any:
    shape = resolved(size, x.shape)
    fields = x._viewed(shape)
    if fields is None:
        return NotImplemented
    part = x._part
    return x._made(shape, fields, device=x.device)._over(x, part if part is None or part.whole is None else part.then(lambda y: y.view(shape)))


def _expand(func: Any, x: QuantizedTensor, size: Sequence[int], *, implicit: bool = False) -> Any:
    same = len(size) == x.dim() and all(wanted in (-1, have) for wanted, have in zip(size, x.shape, strict=True))
    return x._like(requires_grad=False) if same else NotImplemented


def _as_strided(func: Any, x: QuantizedTensor, size: Sequence[int], stride: Any, storage_offset: Any = None) -> Any:
    if tuple(size) == tuple(x.shape) and tuple(stride) == x.stride() and not storage_offset:
        return x._like(requires_grad=False)
    data = x.get_metadata()[x._ALIKE] if x._ALIKE else None
    if data is None or not data.is_contiguous() or not size or 0 in size:
        return NotImplemented

    def cut(y: torch.Tensor) -> torch.Tensor:
        return y.as_strided(size, stride, y.storage_offset() + (storage_offset or 0))

    return x._of_values(cut(data), cut, moves=False)


def _by_bytes(func: Any, x: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    """Values that change places alone, by their bytes, of a format in which these are read alike at every place: parts that share its memory."""
    if not x._ALIKE:
        return NotImplemented
    data, at = x.get_metadata()[x._ALIKE], torch.empty(x.shape, device="meta")
    found, wanted = None if data is None else func(data, *args, **kwargs), func(at, *args, **kwargs)
    several = isinstance(wanted, tuple | list)
    if any(not part.ndim or not part.numel() for part in (wanted if several else [wanted])):
        return NotImplemented
    if not several:
        return x._of_values(found, lambda y: func(y, *args, **kwargs))
    return [x._of_values(found and found[i], lambda y, i=i: func(y, *args, **kwargs)[i]) for i in range(len(wanted))]


def _places(func: Any, x: QuantizedTensor, *args: Any, **kwargs: Any) -> Any:
    """An operation that writes to some places: what it leaves as it is keeps its bytes, where its scale stays."""
    if x._part is not None or x.dtype not in FLOATS:
        return NotImplemented
    exact = x._dequantized(torch.float32)
    before = exact.to(x.dtype)
    args, kwargs = tree_map(lambda a: a._dequantized(a.dtype) if _quantized(a) else a, (args, kwargs))
    after = func(before.clone(), *args, **kwargs)
    changed = after != before
    if bool(changed.any()):
        x._write_where(torch.where(changed, after.float(), exact), changed)
    return x


def _slice(func: Any, x: QuantizedTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    length = x.shape[dim]
    begin, stop, _ = slice(start, end).indices(length)
    whole = (begin, stop, step) == (0, length, 1)
    if x._undivided and not whole:
        of, got = f"what torch.distributed.checkpoint reads into a {type(x).__name__}", f"{stop - begin} of {length}"
        raise CheckpointError(expected("all rows at once", of=of, got=got, do="load with planner=fusible.pytorch.checkpoint.LoadPlanner(state_dict)"))
    if whole:
        return x._like(requires_grad=False)
    return _of_rows(func, x, [(begin, stop)] if dim in (0, -x.dim()) and step == 1 else [], dim, start, end, step)


def _split(func: Any, x: QuantizedTensor, split_size: int, dim: int = 0) -> Any:
    starts = range(0, x.shape[0], split_size) if dim in (0, -x.dim()) and split_size else []
    return _of_rows(func, x, [(start, min(start + split_size, x.shape[0])) for start in starts], split_size, dim)


def _split_with_sizes(func: Any, x: QuantizedTensor, split_sizes: Sequence[int], dim: int = 0) -> Any:
    ends = list(itertools.accumulate(split_sizes)) if dim in (0, -x.dim()) and sum(split_sizes) == x.shape[0] else []
    return _of_rows(func, x, list(zip([0, *ends], ends, strict=False)), split_sizes, dim)


def _of_rows(func: Any, x: QuantizedTensor, places: Sequence[tuple[int, int]], *args: Any) -> Any:
    if x._ALIKE:
        return _by_bytes(func, x, *args)
    parts = [x._rows(start, stop) for start, stop in places]
    if not parts or any(part is None for part in parts):
        return NotImplemented
    for part in parts:
        part._part = part._part if len(part) == len(x) else COPY
    return parts if func is not _aten.slice.Tensor else parts[0]


def _of_buffer(func: Any, x: QuantizedTensor, *args: Any) -> Any:
    results = [func(tensor, *args) for tensor in x.get_data_tensors() if tensor is not None]
    return results[0] if results else NotImplemented


HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.clone.default: _clone,
    _aten.copy_.default: _copy,
    _aten._to_copy.default: _to_copy,
    _aten.new_empty.default: _new_empty,
    _aten.empty_like.default: _empty_like,
    _aten.new_zeros.default: _new_zeros,
    _aten.zeros_like.default: _zeros_like,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten._reshape_alias.default: _view,
    _aten.expand.default: _expand,
    _aten.as_strided.default: _as_strided,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _by_bytes,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_with_sizes,
    _aten.unbind.int: _by_bytes,
    _aten.index_put_.default: _places,
    _aten._index_put_impl_.default: _places,
    _aten.index_fill_.int_Scalar: _places,
    _aten.index_fill_.int_Tensor: _places,
    _aten.index_copy_.default: _places,
    _aten.masked_fill_.Scalar: _places,
    _aten.masked_fill_.Tensor: _places,
    _aten.masked_scatter_.default: _places,
    _aten.scatter_.src: _places,
    _aten.scatter_.value: _places,
    _aten.is_pinned.default: _of_buffer,
    _aten.record_stream.default: _of_buffer,
}
"""The operations that know the formats: each gives its result, or NotImplemented where it must see the values."""
