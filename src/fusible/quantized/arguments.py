"""What the methods of quantizers and of quantized tensors may be given: looked at before they begin, for what they are given is often read much
later, or not by them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusible.errors import ShapeError, expected
from fusible.tex.argument_kinds import Kind, Wrong, kind_of, shown
from fusible.tex.protocol import is_quantized

__all__ = ["check_methods"]

_HERE = __name__.partition(".")[0] + "."
_SIZE = Kind("an integer of at least 0", lambda x: hasattr(x, "__index__") and not isinstance(x, bool) and int(x) >= 0, error=ShapeError)


class _Sizes(Kind):
    """Any iterable; of a list or a tuple each size is looked at, as these can be gone through twice."""

    def wrong(self, value: Any, place: str) -> Wrong | None:
        if isinstance(value, list | tuple) and (value or self.accepts(value)):
            return next((found for i, size in enumerate(value) if (found := _SIZE.wrong(size, f"{place}[{i}]"))), None)
        return None if self.accepts(value) else (place, self, shown(value))


def _named(text: str) -> Kind:
    found = kind_of(text)
    assert found is not None, text
    return found


_TENSOR = _named("Tensor")
_FLAG = Kind(
    "a tensor [1]",
    lambda x: isinstance(x, torch.Tensor) and x.numel() == 1 and x.ndim < 2 and x.layout is torch.strided and not x.is_meta and not x.is_complex(),
)
_DENSE = Kind("a dense tensor", lambda x: _TENSOR.accepts(x) and getattr(x, "layout", torch.strided) is torch.strided)
_SOURCE = Kind("a dense tensor", lambda x: _DENSE.accepts(x) or is_quantized(x) or (hasattr(x, "dequantize") and not isinstance(x, torch.Tensor)))
_STORAGE = Kind("a quantized tensor", lambda x: is_quantized(x) or hasattr(x, "_quantizer"))
_BUFFERS = Kind("a list of tensors", lambda x: isinstance(x, list | tuple) and all(isinstance(item, torch.Tensor) for item in x))
_PARTS = Kind(
    "a list of quantized tensors", lambda x: isinstance(x, list | tuple) and len(x) > 0 and all(hasattr(item, "fsdp_extract_buffers") for item in x)
)
_SAVED = Kind("a list of tensors", lambda x: isinstance(x, list | tuple))
_TOLD = Kind("what fsdp_extract_buffers tells", lambda x: isinstance(x, dict) and "field_names" in x)
_ANNOUNCED = Kind(
    "what fsdp_pre_all_gather tells", lambda x: isinstance(x, tuple) and [*map(type, x)] == [dict, dict, int, int] and _TOLD.accepts(x[0])
)
_MESH = Kind("a device mesh", lambda x: hasattr(x, "get_group"))
_SHARD = Kind("a quantized tensor", lambda x: hasattr(x, "fsdp_assign_gathered"))
_SIZES = _Sizes("a list of sizes", lambda x: hasattr(x, "__iter__") and not isinstance(x, str | torch.Tensor))
_SOME_SIZES = _Sizes("a list of at least one size", lambda x: isinstance(x, list | tuple) and len(x) > 0)
_BOOL, _QUANTIZER = _named("bool"), _named("Quantizer")

_KINDS: dict[str, Kind] = {
    "all_gather_outputs": _BUFFERS,
    "columnwise": _BOOL,
    "columnwise_usage": _BOOL | None,
    "device": _named("Device") | None,
    "dtype": _named("DTypeLike") | None,
    "dst": Kind("a quantized tensor", lambda x: x is not None),  # what kind of one, the quantizer says
    "fake_dtype": _named("DTypeLike"),
    "gathered": _BUFFERS,
    "inp": _TENSOR,
    "mesh": _MESH | None,
    "meta": _TOLD,
    "metadata": _ANNOUNCED,
    "noop_flag": _FLAG | None,
    "out": _STORAGE | None,
    "param_dtype": _named("torch.dtype"),
    "parts": _PARTS,
    "pin_memory": _BOOL,
    "quantizer": _QUANTIZER,
    "requires_grad": _BOOL,
    "rowwise": _BOOL,
    "rowwise_usage": _BOOL | None,
    "shape": _SIZES,
    "src": _SOURCE,
    "tensor": _SOURCE,
    "tensors": _SAVED,
}
"""By the name of a parameter what it may be, in whatever method."""
_ALSO: dict[tuple[str, str], Kind] = {
    ("make_like", "dtype"): _named("torch.dtype") | None,
    ("make_like", "shape"): _SIZES | None,
    ("make_like", "tensor"): _STORAGE,
    ("copy_from_storage", "src"): _STORAGE,
    ("convert_shape_for_fp4", "shape"): _SOME_SIZES,
    ("get_columnwise_shape", "shape"): _SOME_SIZES,
    ("get_scale_shape", "shape"): _SOME_SIZES,
    ("fsdp_post_all_gather", "out"): _SHARD | None,
    ("set_usage", "columnwise"): _BOOL | None,
    ("set_usage", "rowwise"): _BOOL | None,
    ("take_state_of", "other"): _QUANTIZER,
}
_AT_ONCE: dict[int, frozenset[type]] = {id(kind): frozenset({bool}) for kind in (_BOOL, _KINDS["rowwise_usage"])}
"""By a kind, classes whose instances are right without another look: these methods are called in every step."""


def check_methods(cls: type) -> None:
    """Let the public methods that ``cls`` defines refuse, before they begin, an argument that is not of the kind that its name stands for.

    Raises ``DTypeError``, ``ArgumentError`` for a value of the right class. Classes from outside the package are left alone.
    """
    if not cls.__module__.startswith(_HERE):
        return
    for name, value in list(vars(cls).items()):
        if name != "__call__" and name.startswith("_"):
            continue
        around = type(value) if isinstance(value, classmethod | staticmethod) else None
        function = value.__func__ if around is not None else value
        if inspect.isfunction(function) and (kinds := _kinds_of(function, name)):
            checked = _checked(function, name, kinds, own=around is not staticmethod, owner=cls.__name__)
            setattr(cls, name, checked if around is None else around(checked))


def _kinds_of(function: Callable[..., Any], name: str) -> dict[str, Kind]:
    found = {own: _ALSO.get((name, own), _KINDS.get(own)) for own in inspect.signature(function).parameters}
    return {own: kind for own, kind in found.items() if kind is not None}


def _checked(function: Callable[..., Any], name: str, kinds: Mapping[str, Kind], *, own: bool, owner: str) -> Callable[..., Any]:
    """``function``, checked before; ``own``: its first argument is whose method it is."""
    parameters = inspect.signature(function).parameters.values()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][own:]
    rows = {key: (key, kind, _AT_ONCE.get(id(kind), frozenset[type]())) for key, kind in kinds.items()}
    places = [rows.get(key) for key in positional]

    def refuse(args: tuple[Any, ...], found: Wrong) -> Exception:
        subject = args[0] if own and args else None
        title = owner if subject is None else getattr(subject, "__name__", type(subject).__name__)
        place, kind, got = found
        of = f"{place} of {title if name == '__call__' else f'{title}.{name}'}"
        return kind.error(expected(kind.what, of=of, got=got, do="pass one"))

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value, row in zip(args[own:], places, strict=False):
            if row is not None and value.__class__ not in row[2] and (found := row[1].wrong(value, row[0])) is not None:
                raise refuse(args, found)
        for key, value in kwargs.items():
            row = rows.get(key)
            if row is not None and value.__class__ not in row[2] and (found := row[1].wrong(value, key)) is not None:
                raise refuse(args, found)
        return function(*args, **kwargs)

    return checked
