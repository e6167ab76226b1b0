"""Types of the arguments of quantizers and quantized tensors, checked before a method begins: many arguments are read much later, or by other code.

A method that says ``noop_flag: NoopFlag | None`` has its calls checked. Each name of this file is a type for type checkers, and a ``Kind`` that
values are checked against; Python's own (``bool``, ``int | None``, ``torch.dtype``) mean what they say. ``Any`` allows anything.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import torch

from fusible.errors import ShapeError
from fusible.tex.calls.argument_kinds import Kind, ListOf, Wrong, kind_of, shown
from fusible.tex.calls.constructors import kinds_of, looked_at
from fusible.tex.formats import is_quantized

__all__ = [
    "AnyTensor",
    "Buffers",
    "Count",
    "DTypeLike",
    "Dense",
    "Device",
    "Extracted",
    "GatherInput",
    "Grouped",
    "HostSizes",
    "MemberShapes",
    "Mesh",
    "NoopFlag",
    "Parts",
    "QuantizerLike",
    "Saved",
    "Shard",
    "Size",
    "Sizes",
    "SizesOfMembers",
    "SomeSizes",
    "Source",
    "Sources",
    "Storage",
    "Target",
    "check_methods",
]

_HERE = __name__.partition(".")[0] + "."


def _is_int(x: Any) -> bool:
    return hasattr(x, "__index__") and not isinstance(x, bool | torch.Tensor)


def _is_size(x: Any) -> bool:
    one = isinstance(x, torch.Tensor) and x.numel() == 1 and not x.is_floating_point() and not x.is_complex() and not x.is_meta
    return (one or _is_int(x)) and int(x) >= 0


_SIZE = Kind("an integer of at least 0", _is_size, error=ShapeError)


class _Sizes(Kind):
    """Any iterable; of a list or a tuple each size is looked at, as these can be gone through twice."""

    def wrong(self, value: Any, place: str) -> Wrong | None:
        if isinstance(value, list | tuple) and (value or self.accepts(value)):
            return next((found for i, size in enumerate(value) if (found := _SIZE.wrong(size, f"{place}[{i}]"))), None)
        return None if self.accepts(value) else Wrong(place, self, shown(value))


def _of_tex(text: str) -> Kind:
    found = kind_of(text)
    assert found is not None, text
    return found


_TENSOR = _of_tex("Tensor")
_QUANTIZER = _of_tex("Quantizer")


def _is_flag(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.numel() == 1 and x.ndim < 2 and x.layout is torch.strided and not x.is_meta and not x.is_complex()


def _is_source(x: Any) -> bool:
    dense = _TENSOR.accepts(x) and getattr(x, "layout", torch.strided) is torch.strided
    return dense or is_quantized(x) or (hasattr(x, "dequantize") and not isinstance(x, torch.Tensor))


def _is_extracted(x: Any) -> bool:
    return isinstance(x, dict) and "field_names" in x


def _is_gather_input(x: Any) -> bool:
    return isinstance(x, tuple) and [*map(type, x)] == [dict, dict, int, int, tuple] and _is_extracted(x[0])


def _is_dense(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout is torch.strided


def _are_sizes(x: Any) -> bool:
    return _is_dense(x) and x.ndim == 1 and x.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _are_parts(x: Any) -> bool:
    return _are_some(x) and all(hasattr(item, "fsdp_extract_buffers") for item in x)


def _is_matrix(x: Any) -> bool:
    return isinstance(x, list | tuple) and len(x) == 2 and all(map(_SIZE.accepts, x))


def _are_some(x: Any) -> bool:
    return isinstance(x, list | tuple) and len(x) > 0


def _are_tensors(x: Any) -> bool:
    return isinstance(x, list | tuple) and all(isinstance(item, torch.Tensor) for item in x)


AnyTensor = Annotated[Any, _TENSOR]
"""A tensor of any kind and layout."""

Source = Annotated[Any, Kind("a dense tensor", _is_source)]
"""What can be quantized: a dense tensor, or a quantized one."""

Storage = Annotated[Any, Kind("a quantized tensor", lambda x: is_quantized(x) or hasattr(x, "_quantizer"))]
"""A quantized tensor or its bare storage."""

Target = Annotated[Any, Kind("a quantized tensor", lambda x: x is not None)]
"""What a quantizer writes to. Each quantizer checks its class itself."""

NoopFlag = Annotated[Any, Kind("a tensor [1]", _is_flag)]
"""A tensor of one number: nothing is written where it is 1."""

Sizes = Annotated[Iterable[int], _Sizes("a list of sizes", lambda x: hasattr(x, "__iter__") and not isinstance(x, str | torch.Tensor))]
"""A shape, of a scalar also."""

SomeSizes = Annotated[Sequence[int], _Sizes("a list of at least one size", _are_some)]
"""A shape that has a last dimension."""

Sources = Annotated[Sequence[Any], ListOf("a list of dense tensors", _are_some, Kind("a dense tensor", _is_source))]
"""Several tensors to quantize."""

Dense = Annotated[torch.Tensor, Kind("a dense torch.Tensor", _is_dense)]
"""A plain tensor that lies in memory."""

Grouped = Annotated[Any, _of_tex("GroupedTensor")]
"""A grouped tensor or its bare storage."""

Count = Annotated[int, Kind("an integer of at least 1", lambda x: _is_int(x) and int(x) >= 1)]
"""How many there are: at least one."""

Size = Annotated[int, Kind("an integer of at least 0", lambda x: _is_int(x) and int(x) >= 0)]
"""A number of rows, columns or elements."""

SizesOfMembers = Annotated[torch.Tensor, Kind("a tensor [n] of integers", _are_sizes)]
"""The rows or the columns of each member of a group."""

HostSizes = Annotated[torch.Tensor, Kind("a tensor [n] of integers, with data", lambda x: _are_sizes(x) and not x.is_meta)]
"""Sizes of members whose values are read on the host."""

_MATRIX = Kind("a shape [rows, columns]", _is_matrix, error=ShapeError)
MemberShapes = Annotated[Sequence[Any], ListOf("a list of shapes [rows, columns]", _are_some, _MATRIX)]
"""The shape of each member of a group."""

DTypeLike = Annotated[Any, _of_tex("DTypeLike")]
"""A ``torch.dtype``, a ``tex.DType`` or its integer."""

Device = Annotated[Any, _of_tex("Device")]
"""A ``torch.device`` or its name."""

QuantizerLike = Annotated[Any, _QUANTIZER]
"""A quantizer, of this package or by its attributes."""

Saved = Annotated[list[Any], Kind("a list of tensors", lambda x: isinstance(x, list | tuple))]
"""What ``prepare_for_saving`` gave, perhaps with others after it."""

Buffers = Annotated[Any, Kind("a list of tensors", _are_tensors)]
"""The tensors of ``fsdp_extract_buffers``, gathered."""

Extracted = Annotated[dict[str, Any], Kind("what fsdp_extract_buffers tells", _is_extracted)]
"""What ``fsdp_extract_buffers`` tells of its tensors."""

GatherInput = Annotated[Any, Kind("what fsdp_pre_all_gather tells", _is_gather_input)]
"""What ``fsdp_pre_all_gather`` tells ``fsdp_post_all_gather``."""

Parts = Annotated[Sequence[Any], Kind("a list of quantized tensors", _are_parts)]
"""Rows of one tensor, at least one of them."""

Mesh = Annotated[Any, Kind("a device mesh", lambda x: hasattr(x, "get_group") and hasattr(x, "size"))]
"""A ``DeviceMesh``."""

Shard = Annotated[Any, Kind("a quantized tensor", lambda x: hasattr(x, "fsdp_assign_gathered"))]
"""A quantized tensor that takes gathered buffers."""

_KNOWN: dict[str, Kind] = {
    "Quantizer": _QUANTIZER,
    **{name: value.__metadata__[0] for name, value in vars(sys.modules[__name__]).items() if hasattr(value, "__metadata__")},
}
"""What an annotation may be made of, beside Python's own."""


def check_methods(cls: type) -> None:
    """Let the public methods that ``cls`` defines refuse, before they begin, an argument that is not of the kind that its annotation says.

    Raises ``DTypeError``, ``ArgumentError`` for a value of the right class. Classes from outside the package are left alone.
    """
    if not cls.__module__.startswith(_HERE):
        return
    for name, value in list(vars(cls).items()):
        if name != "__call__" and name.startswith("_"):
            continue
        wrapper = type(value) if isinstance(value, classmethod | staticmethod) else None
        function = value.__func__ if wrapper is not None else value
        if inspect.isfunction(function) and (kinds := kinds_of(function, _KNOWN)):
            checked = looked_at(function, kinds, _owner(cls.__name__, name, own=wrapper is not staticmethod))
            setattr(cls, name, checked if wrapper is None else wrapper(checked))


def _owner(cls: str, method: str, *, own: bool) -> Callable[..., str]:
    """What a sentence calls the method: by the class of the object it was called on, or by ``cls``. ``own``: its first argument is that object."""

    def owner(*args: Any) -> str:
        subject = args[0] if own and args else None
        title = cls if subject is None else getattr(subject, "__name__", type(subject).__name__)
        return title if method == "__call__" else f"{title}.{method}"

    return owner
