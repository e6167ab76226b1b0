"""Functions for many products at once: the experts of a mixture, each with rows of its own.

A *grouped* tensor is a matrix whose rows are divided: group ``i`` has the ``sizes[i]`` rows after those of the groups before it; rows beyond the last
group belong to nobody. It has the type of its first group; under delayed scaling each has a slot, and so a scale, of its own. The sizes stay where
they are: no function reads them, so a pass is the same for all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from fusible import tex
from fusible.errors import ArgumentError, DTypeError, NotServedError, ShapeError, expected
from fusible.nvte.casting import cast_checked, note_amax, plain, quantizer_for
from fusible.nvte.dtype import DType, QuantizedType, Type, accumulator, bit_width, is_quantized_type
from fusible.nvte.elementwise import concatenate, reshape, split
from fusible.nvte.execution import current_pass
from fusible.nvte.tensor import Tensor
from fusible.quantized import Float8Quantizer, GroupedTensorStorage
from fusible.tex.interface.domains import Count

__all__ = [
    "check_sizes",
    "grouped_bgrad_cast",
    "grouped_cast",
    "grouped_cast_stack",
    "grouped_dbias_scaled",
    "grouped_dequantize",
    "grouped_dscales",
    "grouped_matmul",
    "grouped_matmul_transpose",
    "grouped_pad",
    "grouped_transpose_matmul",
    "grouped_transpose_matmul_add",
    "grouped_transpose_matmul_add_whole",
    "grouped_unpad",
    "rows_together",
    "stack",
    "unstack",
]


Weights: TypeAlias = Sequence[Tensor] | Tensor


def check_sizes(sizes: Tensor, groups: int, of: str) -> None:
    """Raise ``DTypeError`` or ``ShapeError`` unless ``sizes`` are integers ``[groups]``; ``of`` names who takes them."""
    if sizes.dtype not in (DType.Int32, DType.Int64):
        raise DTypeError(expected("int32 or int64", of=f"the split sizes of {of}", got=str(sizes.dtype), do="cast them"))
    if sizes.shape != (groups,):
        raise ShapeError(expected(f"shape [{groups}]", of=f"the split sizes of {of}", got=list(sizes.shape), do="give the rows of each group"))


def rows_together(types: Sequence[Type]) -> int:
    """The number of which each group's rows must be a multiple, so that it can be quantized in any of ``types``."""
    return math.lcm(*[form.length for type in types if isinstance(type, QuantizedType) for form in type.block_formats if form.whole])


def grouped_pad(x: Tensor, sizes: Tensor, multiple: Count) -> tuple[Tensor, Tensor]:
    """``x [rows, columns]`` with zeros after each of its groups, and the new sizes, multiples of ``multiple``. With ``multiple`` 1 both are returned
    as they are. The rows of the result depend on the shapes alone. Raises ``ShapeError`` where the groups have more rows than x."""
    if multiple == 1:
        return x, sizes
    padded, padded_sizes = tex.prim.pad_groups(x.data, sizes.data, multiple)
    return Tensor(padded, x.type), Tensor(padded_sizes, sizes.type)


def grouped_unpad(x: Tensor, sizes: Tensor, multiple: Count, rows: int) -> Tensor:
    """The inverse of ``grouped_pad``: ``[rows, columns]``, 0 in rows that belong to nobody. ``sizes``: those before."""
    return x if multiple == 1 else Tensor(tex.prim.unpad_groups(x.data, sizes.data, multiple, rows), x.type)


def grouped_cast(x: Tensor, sizes: Tensor, types: Sequence[Type]) -> Tensor:
    """``x [rows, columns]`` divided by ``sizes``, each group in its type; the amaxes are noted in the running pass.

    The types differ in nothing but their slots. Raises ``ArgumentError`` for others or of another number, and ``ShapeError`` where a group does not
    consist of whole blocks and the format asks for that.
    """
    _check_types(types, sizes.shape[0])
    if not is_quantized_type(types[0]):
        return _view(cast_checked(x, types[0]), *_division(x, sizes, x.shape[1]))
    quantizer, (first_dims, offsets) = _quantizer_for(types), _division(x, sizes, x.shape[1])
    data = tex.group_quantize(x.data, quantizer, len(types), first_dims, None, offsets, None, None)
    return _emit(data, types, quantizer)


def grouped_cast_stack(x: Tensor, types: Sequence[Type]) -> Tensor:
    """``x [groups, rows, columns]``, each matrix in its (quantized) type, as a grouped tensor; else as ``grouped_cast``."""
    groups, rows, columns = x.shape
    _check_types(types, groups)
    quantizer = _quantizer_for(types)
    matrix = tex.prim.reshape(x.data, (groups * rows, columns))
    return _emit(tex.group_quantize(matrix, quantizer, groups, None, None, None, None, None), types, quantizer)


def grouped_dequantize(x: Tensor, dtype: DType) -> Tensor:
    """``x``, each group's ``value * scale_inv`` rounded once to ``dtype``, of equal groups or of others."""
    return Tensor(tex.group_dequantize(x.data, dtype), dtype)


def grouped_bgrad_cast(dy: Tensor, sizes: Tensor, types: Sequence[Type], dbias_type: DType) -> tuple[Tensor, Tensor]:
    """``(grouped_cast(dy), dbias)`` with ``dbias [groups, columns]`` the sums of ``dy`` over each group's rows in fp32.

    Where ``dy`` is quantized by the same read, they are rounded to its dtype first, as tex gives them.
    """
    _check_types(types, sizes.shape[0])
    first_dims, offsets = _division(dy, sizes, dy.shape[1])
    if not is_quantized_type(types[0]):
        y = cast_checked(dy, types[0])
        wide = dy if bit_width(dy.dtype) >= bit_width(dbias_type) else cast_checked(dy, dbias_type)
        sums = tex.bgrad_group_quantize(wide.data, None, len(types), first_dims, None, offsets)[1]
        return _view(y, first_dims, offsets), plain(sums, dbias_type)
    quantizer = _quantizer_for(types)
    data, sums = tex.bgrad_group_quantize(dy.data, quantizer, len(types), first_dims, None, offsets)
    return _emit(data, types, quantizer), plain(sums, dbias_type)


def grouped_matmul_transpose(x: Tensor, weights: Weights, type: DType, bias: Tensor | None = None, bias_scale: Tensor | None = None) -> Tensor:
    """``x_i @ weights[i].T + bias[i]`` for every group: ``[rows, K], groups of [N, K] -> [rows, N]``; 0 in rows that belong to nobody.

    ``weights``: of equal size, also as one grouped tensor. ``bias``: ``[groups, N]``; each row takes it times its entry of ``bias_scale [rows]``,
    where given.
    """
    scale = tex.prim.reshape(tex.prim.cast(bias_scale.data, accumulator(x.type)), (x.shape[0],)) if bias_scale is not None else None
    return _by_weight(weights, True, x, _weight_shape(weights)[0], type, _rows_of(bias) if bias is not None else None, scale)


def grouped_matmul(dy: Tensor, weights: Weights, type: DType) -> Tensor:
    """``dy_i @ weights[i]`` for every group: ``[rows, N], groups of [N, K] -> [rows, K]``; 0 in rows that belong to nobody."""
    return _by_weight(weights, False, dy, _weight_shape(weights)[1], type)


def _weight_shape(weights: Weights) -> tuple[int, ...]:
    """The shape of each of the weights."""
    if not isinstance(weights, Tensor):
        return weights[0].shape
    rows, columns = weights.data.logical_shape
    return rows // weights.data.num_tensors, columns


def grouped_transpose_matmul(dy: Tensor, x: Tensor, type: DType) -> Tensor:
    """``dy_i.T @ x_i`` for every group: ``[rows, N], [rows, K] -> [groups, N, K]``; 0 for an empty group."""
    shape = dy.data.num_tensors, dy.shape[1], x.shape[1]
    return _into_one(dy, x, tex.prim.empty((math.prod(shape),), type, _buffer(x)), shape, type, 0.0)


def grouped_transpose_matmul_add(dy: Tensor, x: Tensor, addends: Sequence[Tensor]) -> Sequence[Tensor]:
    """``dy_i.T @ x_i + addends[i]`` for every group, in the type of ``addends``, ``[N, K]`` each. They are used up: the results lie there."""
    matrices = [addend.data for addend in addends]
    tex.te_general_grouped_gemm_for_discrete_out(x.data, False, dy.data, True, matrices, None, None, *_factors(x, 1.0), None, None, True, 0)
    return addends


def grouped_transpose_matmul_add_whole(dy: Tensor, x: Tensor, addend: Tensor) -> Tensor:
    """``grouped_transpose_matmul_add`` of one tensor of ``[groups, N, K]``, which is used up: its memory may be the result's."""
    shape = addend.shape
    return _into_one(dy, x, tex.prim.reshape(addend.data, (math.prod(shape),)), shape, addend.dtype, 1.0)


def grouped_dbias_scaled(dy: Tensor, sizes: Tensor, bias_scale: Tensor, type: DType) -> Tensor:
    """``sum_r bias_scale[r] * dy[r]`` over each group's rows: ``[rows, N], [rows] -> [groups, N]``, summed in fp32 and rounded once to ``type``."""
    wide, groups = accumulator(dy.type), sizes.shape[0]
    scale = Tensor(tex.prim.reshape(tex.prim.cast(bias_scale.data, wide), (dy.shape[0], 1)), wide)
    sums = grouped_transpose_matmul(grouped_cast(dy, sizes, [dy.type] * groups), grouped_cast(scale, sizes, [scale.type] * groups), wide)
    return plain(tex.prim.reshape(sums.data, (groups, dy.shape[1])), type)


def grouped_dscales(dy: Tensor, sizes: Tensor, bias: Tensor, type: DType) -> Tensor:
    """``dy[r] . bias[i]`` for each row of group ``i``: ``[rows, N], [groups, N] -> [rows]``, summed in fp32 and rounded once to ``type``."""
    groups = sizes.shape[0]
    products = _by_weight(split(bias, [1] * groups, 0), True, grouped_cast(dy, sizes, [dy.type] * groups), 1, accumulator(dy.type))
    return plain(tex.prim.reshape(products.data, (dy.shape[0],)), type)


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape and (unquantized) type as one, ``[count, *shape]``."""
    return concatenate([reshape(x, (1, *x.shape)) for x in tensors], 0)


def unstack(x: Tensor) -> list[Tensor]:
    """The parts of an (unquantized) tensor along its first dimension, which they lack; they share its memory."""
    return [reshape(part, x.shape[1:]) for part in split(x, [1] * x.shape[0], 0)]


def _check_types(types: Sequence[Type], groups: int) -> None:
    if len(types) != groups:
        raise ArgumentError(expected(f"one type for each of {groups} groups", of="types", got=len(types), do="give as many types as sizes"))


def _division(x: Tensor, sizes: Tensor, columns: int) -> tuple[Any, Any]:
    """The sizes and the offsets of a grouped tensor of ``columns``, where ``x [rows, columns]`` lies."""
    if len(x.shape) != 2:
        raise ShapeError(expected("[rows, columns]", of="a tensor divided into groups", got=list(x.shape), do="reshape it"))
    first_dims, (offsets,) = tex.splits_to_offsets_multi(
        sizes.data, x.data.device, strides=[columns], include_leading_zero=[True], dtypes=[DType.Int64]
    )
    return first_dims, offsets


def _view(x: Tensor, first_dims: Any, offsets: Any) -> Tensor:
    """The unquantized matrix ``x`` as a grouped tensor of the same memory."""
    flat = tex.prim.reshape(x.data, (math.prod(x.shape),))
    return Tensor(_grouped(flat, x.shape, first_dims, offsets), x.type)


def _grouped(flat: Any, shape: tuple[int, ...], first_dims: Any, offsets: Any) -> GroupedTensorStorage:
    return GroupedTensorStorage(shape, flat.dtype, data=flat, num_tensors=first_dims.shape[0], first_dims=first_dims, tensor_offsets=offsets)


def _quantizer_for(types: Sequence[Type]) -> Any:
    """The descriptor by which tex quantizes all groups; under delayed scaling it has a scale for each."""
    first = types[0]
    if not all(_alike(type, first) for type in types):
        of, do = "the groups of one grouped tensor", "let the recipe give all groups the same quantizer"
        raise ArgumentError(expected("one quantizer", of=of, got=", ".join(map(str, dict.fromkeys(types))), do=do))
    _check_grouped(first)
    if not _is_delayed(first):
        return quantizer_for(first)
    scale = tex.prim.concatenate([current_pass().scale(type.slot) for type in types], 0)  # type: ignore[union-attr]
    return Float8Quantizer(scale, None, first.dtype, columnwise=False, internal=True)  # type: ignore[union-attr]


def _check_grouped(type: Type) -> None:
    """Raise ``NotServedError`` for what a quantizer has to be called for, tensor by tensor: no function of tex takes groups of that. One that keeps
    tensors as they are has nothing to do."""
    if type.__class__ is QuantizedType and type.applied and getattr(type.quantizer, "dtype", type) is not None:  # type: ignore[union-attr]
        do = "let the recipe give these layers a quantizer of one format, or None"
        raise NotServedError(expected("a format that groups can have", of="what grouped products read", got=str(type), do=do))


def _is_delayed(type: Type) -> bool:
    return isinstance(type, QuantizedType) and type.delayed


def _alike(a: Type, b: Type) -> bool:
    return a == b or (_is_delayed(a) and _is_delayed(b) and a.dtype == b.dtype)  # type: ignore[union-attr]


def _emit(data: Any, types: Sequence[Any], quantizer: Any) -> Tensor:
    if isinstance(quantizer, Float8Quantizer):
        for type, amax in zip(types, tex.prim.split(quantizer.amax, [1] * len(types), 0), strict=True):
            note_amax(type.slot, amax)
    return Tensor(data, types[0])


def _by_weight(weights: Weights, transpose: bool, x: Tensor, columns: int, type: DType, bias: Any = None, bias_scale: Any = None) -> Tensor:
    """``x_i @ op(weights[i])``, in zeros, so that rows of nobody have a value."""
    buffer = _buffer(x)
    shape, first_dims = (x.shape[0], columns), x.data.first_dims
    out = tex.prim.full((math.prod(shape),), 0.0, type, buffer)
    place = _grouped(out, shape, first_dims, tex.splits_to_offsets(first_dims, columns))
    for weight in () if isinstance(weights, Tensor) else weights:
        _check_grouped(weight.type)
    matrices = weights.data if isinstance(weights, Tensor) else [weight.data for weight in weights]
    tex.te_general_grouped_gemm_for_discrete_in(matrices, transpose, x.data, False, place, bias, bias_scale, *_factors(x, 0.0), None, None, True, 0)
    return Tensor(tex.prim.reshape(out, shape), type)


def _into_one(dy: Tensor, x: Tensor, flat: Any, shape: tuple[int, ...], type: DType, beta: float) -> Tensor:
    """``dy_i.T @ x_i + beta * D_i`` of every group, written to ``flat``, in which the D lie one after the other."""
    groups, rows, columns = shape
    place = GroupedTensorStorage((groups * rows, columns), flat.dtype, num_tensors=groups, shapes=[(rows, columns)] * groups, data=flat)
    tex.te_general_grouped_gemm_for_grouped_tensor(x.data, False, dy.data, True, place, None, None, *_factors(x, beta), None, None, True, 0)
    return Tensor(tex.prim.reshape(flat, shape), type)


def _factors(x: Tensor, beta: float) -> tuple[Any, Any]:
    """alpha and beta, where the grouped ``x`` lies."""
    return tuple(tex.prim.full((1,), value, DType.Float32, _buffer(x)) for value in (1.0, beta))  # type: ignore[return-value]


def _rows_of(bias: Tensor) -> GroupedTensorStorage:
    """``bias [groups, N]`` as a grouped tensor of one row each."""
    groups, columns = bias.shape
    flat = tex.prim.reshape(bias.data, (groups * columns,))
    return GroupedTensorStorage((groups * columns, 1), bias.data.dtype, num_tensors=groups, shapes=[(columns,)] * groups, data=flat)


def _buffer(x: Tensor) -> Any:
    """A tensor of the framework and device of a grouped one."""
    storage = x.data
    return storage.rowwise_data if storage.rowwise_data is not None else storage.columnwise_data
