"""Grouped tensors: how many tensors lie in one buffer, and how each becomes a tensor of its own.

A grouped tensor is an object with ``num_tensors``, ``logical_shape``, ``first_dims``, ``last_dims``, ``tensor_offsets``, ``quantizer``, and flat
buffers: ``rowwise_data``, ``columnwise_data``, ``scale_inv``, ``columnwise_scale_inv``, ``amax``, ``columnwise_amax``. What a member of a format
calls the buffers is said by the format (``member_fields``); everything else here is the same for all formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from fusible.errors import ArgumentError, DTypeError, ShapeError, check_callable, check_class, expected
from fusible.tex.formats import NVFP4_OPTIONS, scheme_of
from fusible.tex.interface.arguments import GroupedTensor, QuantizedTensor
from fusible.tex.interface.declare import CallArguments
from fusible.tex.protocol import QuantizerLike

__all__ = [
    "GroupLayout",
    "build_grouped",
    "check_list_lengths",
    "check_quantized_group",
    "group_arguments",
    "is_grouped",
    "layout_of",
    "layout_of_grouped",
    "member_fields",
    "members",
    "register_grouped_factory",
]

_FACTORIES: dict[type, Callable[..., Any]] = {}


def check_list_lengths(call: CallArguments, outputs: int) -> None:
    """Raise ``ArgumentError`` unless the lists of a call of ``te_general_grouped_gemm`` are as long as A, as are its ``outputs``, ``DTypeError``
    for a bias or an input of a GELU that is no tensor."""
    counts = [len(call.A), len(call.B), len(call.bias), len(call.pre_gelu_out), outputs]
    if len({*counts}) != 1:
        of = "A, B, bias, pre_gelu_out and D of te_general_grouped_gemm"
        raise ArgumentError(expected("lists of equal length", of=of, got=counts, do="pass one of each per problem"))
    for name in ("bias", "pre_gelu_out"):
        for i, x in enumerate(getattr(call, name)):
            if not (hasattr(x, "shape") and hasattr(x, "dtype")):
                of, got = f"{name}[{i}] of te_general_grouped_gemm", type(x).__qualname__
                raise DTypeError(expected("a tensor", of=of, got=got, do="pass an empty one for none"))


def register_grouped_factory(quantizer_class: type, factory: Callable[..., Any]) -> None:
    """Build grouped tensors for ``quantizer_class`` (and its subclasses) by ``factory(like, /, **fields)``, ``like`` being such a quantizer.

    The fields are ``shape`` (logical), ``dtype`` (nominal), ``num_tensors``, ``quantizer`` (None where the data is unquantized), ``data``,
    ``columnwise_data``, ``scale_inv``, ``columnwise_scale_inv``, ``amax``, ``columnwise_amax``, ``first_dims``, ``last_dims``, ``tensor_offsets``,
    ``with_gemm_swizzled_scales``, and of NVFP4 those of ``fusible.tex.formats.NVFP4_OPTIONS``. ``type(None)`` stands for no quantizer.
    """
    check_class(quantizer_class, "quantizer_class of register_grouped_factory")
    check_callable(factory, "factory of register_grouped_factory")
    _FACTORIES[quantizer_class] = factory


def build_grouped(like: QuantizerLike | None, **fields: Any) -> Any:
    """The grouped tensor of the room that the quantizer ``like`` (or None) belongs to."""
    for cls in type(like).__mro__:
        if cls in _FACTORIES:
            return _FACTORIES[cls](like, **fields)
    do = "import fusible.quantized, whose it is" if like is None else "register it by register_grouped_factory"
    raise DTypeError(expected("a quantizer of a registered class", of="a grouped tensor", got=type(like).__qualname__, do=do))


def group_arguments(buffers: Mapping[str, Any], like: Any) -> dict[str, Any]:
    """``buffers`` of a grouped tensor by the arguments of ``build_grouped``, and the options of NVFP4 that ``like``, a quantizer or a grouped tensor,
    has."""
    named = {"data" if name == "rowwise_data" else name: buffer for name, buffer in buffers.items()}
    return named | {name: getattr(like, name) for name in NVFP4_OPTIONS if hasattr(like, name)}


def is_grouped(x: Any) -> bool:
    """Whether ``x`` describes members of one buffer."""
    return hasattr(x, "num_tensors") and hasattr(x, "logical_shape")


def member_fields(quantizer: QuantizerLike) -> Mapping[str, str]:
    """Each buffer of a grouped tensor of ``quantizer``, and the attribute that holds a member's part of it."""
    scheme = scheme_of(quantizer)
    if not scheme.format.member_fields:
        raise DTypeError(expected("a scheme that scales", of="the quantizer of a grouped tensor", got=scheme, do="use such a quantizer"))
    return scheme.format.member_fields


@dataclass(frozen=True)
class GroupLayout:
    """Where the members lie: ``shapes[i]`` begins at element ``offsets[i]`` of the flattened ``logical_shape``."""

    logical_shape: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]

    @property
    def total(self) -> int:
        return math.prod(self.logical_shape)

    def pieces(self, flat: torch.Tensor) -> list[Any]:
        """The members as views of their flat buffer."""
        return [flat[start : start + math.prod(shape)].view(shape) for start, shape in zip(self.offsets, self.shapes, strict=True)]


def _numbers(values: Any, count: int, of: str) -> list[int] | None:
    """A tensor or list of integers, read by the host; None stays None."""
    if values is None:
        return None
    if hasattr(values, "shape") and len(values.shape) != 1:
        raise ShapeError(expected("one dimension", of=f"{of} of a grouped tensor", got=list(values.shape), do="flatten it"))
    found = values.flatten().tolist() if hasattr(values, "tolist") else list(values)
    if any(not isinstance(value, int) for value in found):
        raise DTypeError(expected("integers", of=f"{of} of a grouped tensor", got=getattr(values, "dtype", found), do="pass int64"))
    if len(found) < count:
        raise ShapeError(expected(f"{count} numbers", of=f"{of} of a grouped tensor", got=len(found), do="pass one for each member"))
    return found


def layout_of(logical_shape: Sequence[int], count: int, first_dims: Any = None, last_dims: Any = None, tensor_offsets: Any = None) -> GroupLayout:
    """The layout of ``count`` members.

    Without ``first_dims`` and ``last_dims`` they are equal slices of the rows; ``first_dims`` alone gives each its rows, ``last_dims`` alone its
    columns (each member contiguous), both its shape. They lie one after the other, or where ``tensor_offsets`` (in elements) says. Raises
    ``ShapeError`` where they do not fit ``logical_shape``.
    """
    rows, columns = logical_shape
    if count < 1:
        raise ArgumentError(expected("at least one member", of="a grouped tensor", got=count, do="pass num_tensors"))
    firsts, lasts = _numbers(first_dims, count, "first_dims"), _numbers(last_dims, count, "last_dims")
    if firsts is None and lasts is None and rows % count:
        raise ShapeError(expected(f"a multiple of {count} rows", of="a grouped tensor of equal members", got=rows, do="pass first_dims"))
    firsts = firsts[:count] if firsts is not None else [rows // count if lasts is None else rows] * count
    lasts = lasts[:count] if lasts is not None else [columns] * count
    shapes = tuple(zip(firsts, lasts, strict=True))
    sizes = [first * last for first, last in shapes]
    numbers = _numbers(tensor_offsets, count, "tensor_offsets")
    offsets = numbers[: count + 1] if numbers else [*accumulate(sizes, initial=0)]
    total = math.prod(logical_shape)
    if any(first < 0 or last < 0 for first, last in shapes) or any(
        size and (offset < 0 or offset + size > total) for size, offset in zip(sizes, offsets, strict=False)
    ):
        got = f"members {[list(shape) for shape in shapes]} at {offsets[:count]}"
        of = "first_dims and last_dims of a grouped tensor"
        raise ShapeError(expected(f"members within {list(logical_shape)}", of=of, got=got, do="pass dimensions that fit"))
    # Members may lie in any order, but two at one place would be written over one another.
    places = sorted((offset, offset + size) for offset, size in zip(offsets, sizes, strict=False) if size)
    if any(start < end for (_, end), (start, _) in pairwise(places)) or not 0 <= offsets[-1] <= total:
        wanted, of = f"offsets of members apart within {total} elements", "tensor_offsets of a grouped tensor"
        raise ShapeError(expected(wanted, of=of, got=offsets, do="pass where each member begins, and where the last one ends"))
    return GroupLayout(tuple(logical_shape), shapes, tuple(offsets[:count]))


def layout_of_grouped(x: GroupedTensor) -> GroupLayout:
    """The layout that a grouped tensor describes."""
    shapes = getattr(x, "tensor_shapes", None)
    if not shapes or x.first_dims is not None or x.last_dims is not None:
        return layout_of(x.logical_shape, x.num_tensors, x.first_dims, x.last_dims, x.tensor_offsets)
    matrices = [tuple(shape) if len(shape) == 2 else (1, *shape) for shape in shapes]
    rows, columns = [shape[0] for shape in matrices], [shape[1] for shape in matrices]
    total = sum(math.prod(shape) for shape in matrices)
    return layout_of((1, total), x.num_tensors, rows, columns, x.tensor_offsets)


def members(x: GroupedTensor, create_empty: Callable[..., Any], *, bare: bool = False) -> list[Any]:
    """Each member as a tensor of its own that shares the buffers of ``x``: views, or quantized tensors of the quantizer's class.

    ``create_empty(quantizer, shape, dtype, device)`` makes an empty member, which says how each buffer is shaped; ``bare`` asks for storages.
    """
    layout = layout_of_grouped(x)
    buffer = x.rowwise_data if x.rowwise_data is not None else x.columnwise_data
    if buffer is None:
        raise ArgumentError(expected("data", of="a grouped tensor", got="none", do="use it before it is cleared"))
    if x.quantizer is None:
        return layout.pieces(buffer.view(-1))
    fields = member_fields(x.quantizer)
    quantizer = copy(x.quantizer)
    quantizer.rowwise_usage, quantizer.columnwise_usage = x.rowwise_data is not None, x.columnwise_data is not None
    quantizer.internal = bare or quantizer.internal
    used: dict[str, int] = dict.fromkeys(fields, 0)
    found = []
    for shape, offset in zip(layout.shapes, layout.offsets, strict=True):
        member = create_empty(quantizer, shape, x.fake_dtype, buffer.device)
        _attach(member, x, fields, used, offset, math.prod(shape))
        member._quantizer = x.quantizer
        if hasattr(member, "_with_gemm_swizzled_scales"):
            member._with_gemm_swizzled_scales = x._with_gemm_swizzled_scales
        found.append(member)
    return found


def _attach(member: QuantizedTensor, x: GroupedTensor, fields: Mapping[str, str], used: dict[str, int], offset: int, elements: int) -> None:
    """Put the views of ``x``'s buffers in place of a member's own. Data lies at the member's offset, scales one after the other."""
    for field, attribute in fields.items():
        part, buffer = getattr(member, attribute), getattr(x, field)
        if part is None or buffer is None:
            continue
        size = math.prod(part.shape)
        if field.endswith("data"):
            # A byte may hold two elements: the part's own size says.
            start = offset * size // elements if elements else 0
        else:
            start = used[field]
            used[field] += size
        setattr(member, attribute, buffer.view(-1)[start : start + size].view(part.shape))


def check_quantized_group(x: Any, function: str, do: str) -> None:
    """Raise ``DTypeError`` unless ``x`` is a grouped tensor that is quantized."""
    if not is_grouped(x) or x.quantizer is None:
        got = type(x).__qualname__ if not is_grouped(x) else "an unquantized one"
        raise DTypeError(expected("a quantized grouped tensor", of=function, got=got, do=do))
