"""Parts of quantized tensors: a write to one reaches the tensor that it is a part of, or is refused; it is never lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from fusible.errors import ValuesError, expected
from fusible.quantized.arguments import NoopFlag, Source
from fusible.quantized.formats import FP8_MAX
from fusible.quantized.storage import note_current, note_written
from fusible.tex.calls.inference_tensors import writing
from fusible.tex.protocol import process_group, to_torch

if TYPE_CHECKING:
    from fusible.quantized.tensor import QuantizedTensor

__all__ = ["COPY", "Part", "PartOfValues", "check_writes", "of_values", "write_part", "write_where", "written"]

_ROOM = 16
"""Values smaller than the largest of a scale by more than this are given a scale of their own, where nothing else is under it."""

_ROUNDED = 1 + 2**-5
"""What is larger than the largest of a scale by no more than this factor is rounded to it, in E4M3 and in E5M2."""


@dataclass(frozen=True)
class Part:
    """Where a part lies: ``cut`` gives it of any tensor of the shape of ``whole``. ``whole`` is None of a copy, which nothing may be written to.

    ``moves``: whether ``cut`` takes indices of dimensions alone, so that it cuts tensors of other strides alike.
    """

    whole: Any
    cut: Callable[[torch.Tensor], torch.Tensor]
    moves: bool = True

    def then(self, cut: Callable[[torch.Tensor], torch.Tensor], moves: bool = True) -> Part:
        """The part that ``cut`` gives of this one."""
        return Part(self.whole, lambda x: cut(self.cut(x)), self.moves and moves)


COPY = Part(None, lambda x: x)
"""A part or a view that does not share the memory of its tensor."""


class PartOfValues(torch.Tensor):
    """The dequantized values of a part or a view of a quantized tensor that cannot share its memory. Operations take it for the plain tensor that it
    holds; one that writes to it raises ``ValuesError``, as the quantized tensor would not change. ``clone`` gives a plain tensor."""

    _values: torch.Tensor
    _kind: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, values: torch.Tensor, kind: str) -> PartOfValues:
        made = torch.Tensor._make_subclass(cls, values)
        made._values, made._kind = values, kind
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_writes(func, args, kwargs or {})
        kinds = [leaf._kind for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PartOfValues)]
        result = func(*of_values(args), **of_values(kwargs or {}))
        return tree_map(lambda x: PartOfValues(x, kinds[0]) if type(x) is torch.Tensor else x, result) if func.is_view else result

    def numpy(self, *, force: bool = False) -> Any:
        return self._values.numpy(force=force)

    def tolist(self) -> Any:
        return self._values.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self._values, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._values.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return repr(self._values)

    def __format__(self, spec: str) -> str:
        return self._values.__format__(spec)


def of_values(arguments: Any) -> Any:
    """Arguments with plain tensors in the place of ``PartOfValues``."""
    return tree_map(lambda x: x._values if isinstance(x, PartOfValues) else x, arguments)


def written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    places = [(at, found) for at, found in enumerate(func._schema.arguments) if found.alias_info is not None and found.alias_info.is_write]
    return [leaf for at, found in places for leaf in tree_leaves(args[at] if at < len(args) else kwargs.get(found.name))]


def check_writes(func: Any, args: Any, kwargs: Any) -> None:
    """Raise ``ValuesError`` where an operation writes to a copy of a part, which its tensor would not see. Nothing is written."""
    for x in written(func, args, kwargs):
        part = getattr(x, "_part", None)
        if isinstance(x, PartOfValues) or (part is not None and part.whole is None):
            raise refused(func.__name__.partition(".")[0], x._kind if isinstance(x, PartOfValues) else type(x).__name__)


def refused(what: str, kind: str) -> ValuesError:
    """The error of a write to a copy of a part."""
    do = "assign by an index of the tensor itself, w[0:2] = values, or write to a clone of the part"
    return ValuesError(expected("a tensor that holds its values itself", of=f"{what} of a part of a {kind}", got="a part that is a copy", do=do))


def write_part(x: Any, values: Source, noop_flag: NoopFlag | None = None) -> Any:
    """Write ``values`` to a part that shares its tensor's memory. Raises ``ValuesError`` for one that is a copy."""
    part = x._part
    if part.whole is None:
        raise refused("quantize_", type(x).__name__)
    if noop_flag is not None and bool(noop_flag == 1):
        return x
    plain: Any = values.dequantize(dtype=torch.float32) if hasattr(values, "dequantize") and not isinstance(values, torch.Tensor) else values
    plain = plain._dequantized(torch.float32) if hasattr(plain, "_dequantized") else plain.detach()
    _write(part, plain.to(x.device).expand(x.shape))
    own = x._transpose
    if own is not None and (x._data is None or x._transpose_invalid):  # made of the part
        own.copy_(part.cut(_rows_of(part.whole)).movedim(-1, 0))
        note_current(x)
    return x


def write_where(whole: QuantizedTensor, values: torch.Tensor, changed: torch.Tensor) -> None:
    """Write those ``values`` that have ``changed`` to a tensor under one scale; the others keep their bytes."""
    _write(Part(whole, lambda x: x), values, values[changed])


def _write(part: Part, values: torch.Tensor, seen: torch.Tensor | None = None) -> None:
    """Write ``values`` to a part of a tensor under one scale, by the scale that the tensor has; where the largest of them (of ``seen``) has no room
    under it, the scale grows by a power of two, which leaves the values of others as they are, but for the smallest."""
    whole, seen = part.whole, values if seen is None else seen
    if not seen.numel():
        return
    quantizer, amax = whole._quantizer, seen.abs().amax().to(torch.float32).reshape(1)
    recorded = getattr(quantizer, "amax", None)
    if isinstance(recorded, torch.Tensor):
        recorded.copy_(torch.maximum(recorded, amax.view_as(recorded)))
    grouped = bool(getattr(quantizer, "with_amax_reduction", False))
    if grouped:
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=process_group(quantizer.amax_reduction_group))
    shift = _shift(whole, amax.item(), grouped)
    if shift:
        old = whole._dequantized(torch.float32)
        with writing(whole._scale_inv):
            whole._scale_inv.mul_(2.0**shift)
        if (first := getattr(quantizer, "first_scale", None)) is not None and not first.observed:
            first.fitted = True
        _put(Part(whole, lambda x: x), _cast(whole, old))
    _put(part, _cast(whole, values))


def _shift(whole: Any, amax: float, grouped: bool) -> int:
    """By which power of two the scale of ``whole`` is to grow, for values of up to ``amax``."""
    largest = FP8_MAX[whole._fp8_dtype] * whole._scale_inv.item()
    if not (0 < amax < math.inf and 0 < largest < math.inf):
        return 0
    least = math.ceil(math.log2(amax) - math.log2(largest))
    if amax > largest * _ROUNDED:
        return least
    alone = amax * _ROOM < largest and not grouped and not bool((_rows_of(whole) & 0x7F).any())
    return max(least, -125 - math.frexp(whole._scale_inv.item())[1]) if alone else 0


def _rows_of(whole: Any) -> Any:
    return whole._data if whole._data is not None else whole._transpose.movedim(0, -1)


def _cast(whole: Any, values: torch.Tensor) -> torch.Tensor:
    """``values`` in 8 bits by the scale of ``whole``."""
    largest = FP8_MAX[whole._fp8_dtype]
    scaled = values.to(torch.float32) * whole._scale_inv.reciprocal()
    return scaled.clamp(-largest, largest).to(to_torch(whole._fp8_dtype)).view(torch.uint8)


def _put(part: Part, codes: torch.Tensor) -> None:
    whole = part.whole
    data: Any = whole._data
    transpose: Any = None if whole._transpose_invalid else whole._transpose
    with writing(*(buffer for buffer in (data, transpose) if buffer is not None)):
        if data is not None:
            part.cut(data).copy_(codes)
        if transpose is not None and not part.moves and data is not None:
            transpose.copy_(data.movedim(-1, 0))
        elif transpose is not None:
            part.cut(transpose.movedim(0, -1)).copy_(codes)
    note_written(whole)
