"""Functions that change a tensor's type: quantize, dequantize, and the casts made of them.

"checked" functions return their argument where it has the wanted type already. ``cast_transpose*`` give (cast, cast transposed) from one read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusible import lazy, tex
from fusible.errors import ArgumentError, NotServedError, expected
from fusible.nvte.dtype import DType, QuantizedType, Type, is_quantized_type
from fusible.nvte.execution import current_pass
from fusible.nvte.frameworks import nvte_dtype, te_to_torch_dtype
from fusible.nvte.padding import block_length, cut, is_padded, lacks_blocks, marked, pad
from fusible.nvte.tensor import Data, Tensor
from fusible.quantized import Float8CurrentScalingQuantizer, Float8Quantizer, Float8TensorStorage, GroupedTensorStorage, Quantizer

__all__ = [
    "bgrad_cast",
    "by_columns",
    "cast",
    "cast_checked",
    "cast_transpose",
    "cast_transpose_checked",
    "cast_transpose_dbias_checked",
    "dequantize",
    "emit",
    "multi_cast_transpose",
    "multi_cast_transpose_checked",
    "note_amax",
    "plain",
    "quantize",
    "quantizer_for",
    "transpose",
    "unpadded",
]


def quantizer_for(type: Type, *, columnwise: bool = False) -> Any:
    """A quantizer for one call of tex, which quantizes into ``type``; None for an unquantized type, and for one that tex does not know. After the
    call it goes to ``emit``."""
    if not is_quantized_type(type):
        return None
    if isinstance(type, DType):
        return Float8CurrentScalingQuantizer(type, columnwise=columnwise, internal=True)
    if type.delayed:
        return Float8Quantizer(current_pass().scale(type.slot), None, type.dtype, columnwise=columnwise, internal=True)
    if type.applied:
        return None
    if not columnwise or type.columnwise:
        return type.descriptor
    descriptor = type.descriptor.copy()
    descriptor.columnwise_usage = True
    return descriptor


def emitter(type: Type, shape: Sequence[int]) -> Any:
    """``quantizer_for`` a result of ``shape``. None also where the shape has no whole blocks: then the result comes unquantized, and ``emit`` casts
    it."""
    return None if lacks_blocks(shape, type) else quantizer_for(type)


def emit(data: Data, type: Type, quantizer: Quantizer | None) -> Tensor:
    """Wrap the result of a tex call as a tensor of ``type``: cast it where ``quantizer`` is None, and note the amax that delayed scaling observed."""
    if quantizer is None:
        return cast(Tensor(data, nvte_dtype(data.dtype)), type) if isinstance(type, QuantizedType) else plain(data, type)
    if isinstance(quantizer, Float8Quantizer):
        note_amax(type.slot, quantizer.amax)  # type: ignore[union-attr]
    return Tensor(data, type)


def plain(data: Data, type: DType) -> Tensor:
    """Wrap unquantized data, cast where it is not of the type."""
    return Tensor(data if nvte_dtype(data.dtype) is type else tex.prim.cast(data, type), type)


def note_amax(slot: str, amax: Data) -> None:
    """Leave an amax (fp32 ``[1]``) with the running pass. Raises ``ArgumentError`` where the pass has one of that slot: code of the caller's may have
    quantized by a neighbour's quantizer what it then handed on unquantized."""
    amaxes = current_pass().amaxes
    if slot in amaxes:
        of, do = f"what is quantized by the scale {slot!r} in a pass", "hand on what was quantized, or do not quantize it"
        raise ArgumentError(expected("one tensor", of=of, got="another", do=do))
    amaxes[slot] = amax


def quantize(x: Tensor, type: QuantizedType, scale: Data | None = None) -> tuple[Tensor, Any]:
    """``(q, amax)``: ``x`` in an 8-bit type, and ``max|x|`` (fp32 ``[1]``; None under current scaling, which keeps it to itself).

    ``scale`` (fp32 ``[1]``) defaults to the running pass's for the type's slot. Notes nothing in the pass.
    """
    if type.delayed:
        quantizer: Any = Float8Quantizer(
            scale if scale is not None else current_pass().scale(type.slot), None, type.dtype, columnwise=False, internal=True
        )
        return Tensor(tex.quantize(x.data, quantizer, None, None), type), quantizer.amax
    return Tensor(tex.quantize(x.data, quantizer_for(type), None, None), type), None


def dequantize(x: Tensor, dtype: DType) -> Tensor:
    """``value * scale_inv`` of a quantized tensor, rounded once to ``dtype``."""
    applied = x.type.__class__ is QuantizedType and x.type.applied  # type: ignore[union-attr]
    values = x.data.dequantize(dtype=te_to_torch_dtype(dtype)) if applied else tex.dequantize(x.data, dtype)
    return Tensor(cut(values, x.shape) if is_padded(x) else values, dtype)


def unpadded(x: Tensor) -> Tensor:
    """``x`` without the zeros behind it (``nvte.padding``): its values, in its nominal dtype; where there are none, ``x``."""
    return dequantize(x, nvte_dtype(x.data._dtype)) if is_padded(x) else x


def cast(x: Tensor, type: Type) -> Tensor:
    """``x`` in another type; into an 8-bit one, its amax is noted in the running pass."""
    if is_quantized_type(x.type):
        x = dequantize(x, type if not is_quantized_type(type) else DType.Float32)  # type: ignore[arg-type]
        if not is_quantized_type(type):
            return x
    if not is_quantized_type(type):
        return Tensor(tex.prim.cast(x.data, type), type)
    quantizer = quantizer_for(type)
    lacks = lacks_blocks(x.shape, type)
    data = pad(x.data, block_length(type)) if lacks else x.data
    made = _applied(type, data) if quantizer is None else tex.quantize(data, quantizer, None, None)  # type: ignore[arg-type]
    if lacks:
        return marked(made, type, x.shape)
    return Tensor(made, type) if quantizer is None else emit(made, type, quantizer)


def _applied(type: QuantizedType, data: Data) -> Any:
    """What the quantizer of a type makes, which is called itself. Raises ``NotServedError`` where a user's would have to be recorded, or makes what
    passes cannot keep."""
    if type.scaling != "custom":
        return type.descriptor.quantize(data)
    of = f"the custom quantizer {type.quantizer.__class__.__name__}"
    if isinstance(data, lazy.Tensor):
        do = "leave the model uncompiled, or take a quantizer of fusible.quantized"
        raise NotServedError(expected("a tensor of torch", of=f"what is quantized by {of}", got="one that a compiled pass records", do=do))
    made = type.descriptor.quantize(data)
    lacking = next((name for name in _OF_STORAGES if not hasattr(made, name)), None)
    if lacking is not None:
        do = f"define {lacking}"
        raise NotServedError(expected(f"{lacking} of it", of=f"what is made by {of}", got=f"a {made.__class__.__name__} without", do=do))
    return made


_OF_STORAGES = ("data", "scale", "data_t", "scale_t", "dequantize", "dtype", "prepare_for_saving", "restore_from_saved")
"""What a user's own storage has, beside a shape or size."""


def cast_checked(x: Tensor, type: Type | None) -> Tensor:
    """``cast`` where the type differs; None asks for nothing. A bare 8-bit request is met by any scaling of that format."""
    if type is None or x.type == type or (x.dtype == type and is_quantized_type(x.type)):
        return x
    return cast(x, type)


def by_columns(x: Tensor) -> Tensor:
    """``x`` without the copy that is read along rows, where it has one along columns too: what a backward pass needs of an operand."""
    type = x.type
    if not isinstance(type, QuantizedType) or not (type.rowwise and type.columnwise):
        return x
    rows: frozenset[str] = _GROUPED_ROWS if isinstance(x.data, GroupedTensorStorage) else frozenset()
    fields: dict[str, Any] = {name: None if "rowwise" in name or name in rows else value for name, value in x.data.get_metadata().items()}
    return Tensor(x.data.__class__(**fields), type.read(rowwise=False, columnwise=True))


_GROUPED_ROWS: frozenset[str] = frozenset({"data", "scale_inv", "amax"})
"""The fields of a grouped tensor's row-wise copy."""


def transpose(x: Tensor) -> Tensor:
    """The transposed matrix; of a quantized one the bytes are transposed and the scale is shared."""
    if not is_quantized_type(x.type):
        return Tensor(tex.prim.transpose(x.data), x.type)
    bytes_ = x.columnwise if x.columnwise is not None else tex.fp8_transpose(x.data._data, x.dtype, out=None)
    return _transposed_view(x, bytes_)


def cast_transpose(x: Tensor, type: Type) -> tuple[Tensor, Tensor]:
    """``(cast, cast transposed)`` of a matrix."""
    if not is_quantized_type(type) or is_quantized_type(x.type):
        y = cast(x, type)
        return y, transpose(y)
    quantizer = quantizer_for(type, columnwise=True)
    y = emit(tex.quantize(x.data, quantizer, None, None), type, quantizer)
    return y, _transposed_view(y, y.columnwise)


def cast_transpose_checked(x: Tensor, type: Type | None) -> tuple[Tensor, Tensor]:
    """``cast_transpose`` that does not cast where the type is already right."""
    y = cast_checked(x, type)
    return (y, transpose(y)) if y is x or type is None else cast_transpose(x, type)


def multi_cast_transpose(xs: Sequence[Tensor], types: Sequence[Type]) -> list[tuple[Tensor, Tensor]]:
    """``cast_transpose`` of each tensor to its type."""
    return [cast_transpose(x, type) for x, type in zip(xs, types, strict=True)]


def multi_cast_transpose_checked(xs: Sequence[Tensor], types: Sequence[Type | None]) -> list[tuple[Tensor, Tensor]]:
    """``cast_transpose_checked`` of each tensor to its type."""
    return [cast_transpose_checked(x, type) for x, type in zip(xs, types, strict=True)]


def bgrad_cast(dy: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor]:
    """``(dy in type, dbias)`` with ``dbias [columns]`` the sum of ``dy [rows, columns]`` over its rows in fp32, rounded to ``dbias_type``.

    Where ``dy`` is quantized by the same read, the sum is rounded to its dtype first, as tex gives it.
    """
    quantizer = quantizer_for(type) if not lacks_blocks(dy.shape, type) else None
    if quantizer is not None and not is_quantized_type(dy.type):
        sums, data = tex.bgrad_quantize(dy.data, quantizer)
        return emit(data, type, quantizer), plain(sums, dbias_type)
    decoded = dequantize(dy, DType.Float32) if is_quantized_type(dy.type) else dy
    return cast_checked(dy, type), Tensor(tex.prim.row_sum(decoded.data, dbias_type), dbias_type)


def cast_transpose_dbias_checked(dy: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor, Tensor]:
    """``(cast, cast transposed, dbias)`` of a gradient ``[rows, columns]``."""
    y, dbias = bgrad_cast(dy, type, dbias_type)
    return y, transpose(y), dbias


def _transposed_view(x: Tensor, bytes_: Any) -> Tensor:
    storage = x.data
    return Tensor(
        Float8TensorStorage(
            data=bytes_, fp8_scale_inv=storage._scale_inv, fp8_dtype=storage._fp8_dtype, fake_dtype=storage._dtype, quantizer=storage._quantizer
        ),
        x.type,
    )
