"""Functions for matrix products. ``matmul_transpose`` is fprop (TN), ``matmul`` dgrad (NN), ``transpose_matmul`` wgrad (NT).

Operands may be 8-bit; products accumulate in fp32, are scaled there, and are rounded once to ``type``. Where one operand has zeros behind it
(``nvte.padding``) all else gets them too, up to multiples of ``block``, and the results are cut; ``block`` is 0 where there are none.
"""

from __future__ import annotations

from typing import Any

from fusible import tex
from fusible.nvte.casting import cast_checked, emit, emitter, plain
from fusible.nvte.dtype import DType, Type, is_quantized_type
from fusible.nvte.elementwise import add, dbias
from fusible.nvte.operands import custom_product, read
from fusible.nvte.padding import block_of, cut, pad, pad_columns
from fusible.nvte.tensor import Tensor

__all__ = [
    "matmul",
    "matmul_add",
    "matmul_dbias_dgelu",
    "matmul_dgelu",
    "matmul_transpose",
    "matmul_transpose_add",
    "matmul_transpose_add_add",
    "matmul_transpose_add_gelu",
    "matmul_transpose_add_gelu_add",
    "matmul_transpose_gelu",
    "matmul_transpose_gelu_add",
    "transpose_matmul",
    "transpose_matmul_add",
    "transpose_matmul_dbias",
]


def matmul_transpose(x: Tensor, weight: Tensor, type: Type) -> Tensor:
    """``x @ weight.T``: ``[tokens, K], [N, K] -> [tokens, N]``."""
    return _gemm(weight, True, x, False, type)[0]


def matmul_transpose_add(x: Tensor, weight: Tensor, bias: Tensor, type: Type) -> Tensor:
    """``x @ weight.T + bias`` with ``bias [N]``."""
    return _gemm(weight, True, x, False, type, bias=bias)[0]


def matmul_transpose_add_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, type: Type, alpha: float = 1.0) -> Tensor:
    """``alpha * x @ weight.T + bias + residual`` with ``residual [tokens, N]`` in ``type``, summed in fp32 and rounded once."""
    return _gemm(weight, True, x, False, type, bias=bias, addend=residual, alpha=alpha)[0]


def matmul_transpose_gelu(x: Tensor, weight: Tensor, type: Type, pre_type: DType) -> tuple[Tensor, Tensor]:
    """``(gelu(z), z)`` with ``z = x @ weight.T`` in ``pre_type``; of operands that are not quantized it is rounded to ``type`` first."""
    y, pre = _gemm(weight, True, x, False, type, gelu=True, pre_type=pre_type)
    return y, pre


def matmul_transpose_add_gelu(x: Tensor, weight: Tensor, bias: Tensor, type: Type, pre_type: DType) -> tuple[Tensor, Tensor]:
    """``(gelu(z), z)`` with ``z = x @ weight.T + bias`` in ``pre_type``; of operands that are not quantized it is rounded to ``type`` first."""
    y, pre = _gemm(weight, True, x, False, type, bias=bias, gelu=True, pre_type=pre_type)
    return y, pre


def matmul_transpose_gelu_add(x: Tensor, weight: Tensor, addend: Tensor, type: Type, pre_type: DType) -> tuple[Tensor, Tensor]:
    """``(gelu(z) + addend, z)`` with ``z = x @ weight.T`` in ``pre_type``; ``addend`` is ``[N]`` or ``[tokens, N]``."""
    y, pre = matmul_transpose_gelu(x, weight, pre_type, pre_type)
    return add(y, addend, type), pre


def matmul_transpose_add_gelu_add(x: Tensor, weight: Tensor, bias: Tensor, addend: Tensor, type: Type, pre_type: DType) -> tuple[Tensor, Tensor]:
    """``(gelu(z) + addend, z)`` with ``z = x @ weight.T + bias`` in ``pre_type``."""
    y, pre = matmul_transpose_add_gelu(x, weight, bias, pre_type, pre_type)
    return add(y, addend, type), pre


def matmul(dy: Tensor, weight: Tensor, type: Type, alpha: float = 1.0) -> Tensor:
    """``alpha * dy @ weight``: ``[tokens, N], [N, K] -> [tokens, K]``."""
    return _gemm(weight, False, dy, False, type, grad=True, alpha=alpha)[0]


def matmul_add(dy: Tensor, weight: Tensor, addend: Tensor, type: Type) -> Tensor:
    """``dy @ weight + addend`` with ``addend [tokens, K]`` in ``type``, summed in fp32 and rounded once."""
    return _gemm(weight, False, dy, False, type, grad=True, addend=addend)[0]


def matmul_dgelu(dy: Tensor, weight: Tensor, pre: Tensor, type: Type) -> Tensor:
    """``(dy @ weight) * gelu'(pre)`` with ``pre [tokens, K]``, rounded once."""
    return _dgelu(dy, weight, pre, type, False)[0]


def matmul_dbias_dgelu(dy: Tensor, weight: Tensor, pre: Tensor, type: Type, dbias_type: DType) -> tuple[Tensor, Tensor]:
    """``(d, dbias)`` with ``d = (dy @ weight) * gelu'(pre)``, rounded once, and ``dbias [K]`` the sum of d over rows, before it is rounded; the sum
    comes in ``type`` where that is not quantized, and is cast."""
    d, dbias = _dgelu(dy, weight, pre, type, True)
    return d, plain(dbias, dbias_type)


def _dgelu(dy: Tensor, weight: Tensor, pre: Tensor, type: Type, dbias_too: bool) -> tuple[Tensor, Any]:
    # tex asks for the bias gradient by a bias: any tensor will do, and the input of the GELU is at hand.
    out_type: DType = pre.dtype if is_quantized_type(type) else type  # type: ignore[assignment]
    product = custom_product(weight, False, dy, False, out_type)
    if product is not None:
        d = Tensor(tex.dgelu(product.data, pre.data, None), out_type)
        return cast_checked(d, type), dbias(d, pre.dtype).data if dbias_too else None
    block = block_of(weight, dy)
    quantizer = None if block else emitter(type, pre.shape)
    padded = pad(pre.data, block) if block else pre.data
    result = tex.generic_gemm(
        read(weight, True, block), False, read(dy, False, block), False, None, quantizer, out_type, padded if dbias_too else None, pre.dtype, True,
        padded, True, None, 0, False, True,
    )  # fmt: skip
    data, sums = result[:2]
    if block:
        data, sums = cut(data, pre.shape), _first(sums, pre.shape[-1]) if dbias_too else None
    return cast_checked(Tensor(data, out_type), type) if quantizer is None else emit(data, type, quantizer), sums


def transpose_matmul(dy: Tensor, x: Tensor, type: Type, alpha: float = 1.0) -> Tensor:
    """``alpha * dy.T @ x``: ``[tokens, N], [tokens, K] -> [N, K]``."""
    return _gemm(x, False, dy, True, type, grad=True, alpha=alpha)[0]


def transpose_matmul_add(dy: Tensor, x: Tensor, addend: Tensor, alpha: float = 1.0) -> Tensor:
    """``alpha * dy.T @ x + addend`` in the type of ``addend [N, K]``, summed in fp32. The addend is used up: its memory may be the result's."""
    product = custom_product(x, False, dy, True, addend.type, alpha)  # type: ignore[arg-type]
    if product is not None:
        return add(product, addend, addend.type)
    block = block_of(x, dy)
    into = pad(addend.data, block) if block else addend.data
    result = tex.generic_gemm(
        read(x, True, block), False, read(dy, True, block), True, into, None, addend.type, None, addend.type, False, None, True, None, 0, True, True,
        alpha=alpha,
    )  # fmt: skip
    return Tensor(cut(result[0], addend.shape) if block else result[0], addend.type)


def transpose_matmul_dbias(dy: Tensor, x: Tensor, type: DType, dbias_type: DType) -> tuple[Tensor, Tensor]:
    """``(dy.T @ x, dbias)`` of an unquantized ``dy``, with ``dbias [N]`` the sum of ``dy`` over rows from the same read; it comes in ``type`` and is
    cast."""
    custom_product(x, False, dy, True, type)  # which refuses it, as dy is not quantized
    block = block_of(x)
    rows = pad(dy.data, block) if block else dy.data
    result = tex.generic_gemm(read(x, True), False, rows, True, None, None, type, rows, dbias_type, False, None, True, None, 0, False, True)
    if block:
        shape = dy.shape[-1], x.shape[-1]
        return Tensor(cut(result[0], shape), type), plain(_first(result[1], shape[0]), dbias_type)
    return Tensor(result[0], type), plain(result[1], dbias_type)


def _gemm(
    a: Tensor,
    trans_a: bool,
    b: Tensor,
    trans_b: bool,
    type: Type,
    *,
    bias: Tensor | None = None,
    gelu: bool = False,
    grad: bool = False,
    addend: Tensor | None = None,
    pre_type: DType = DType.BFloat16,
    alpha: float = 1.0,
) -> tuple[Tensor, Any]:
    """``alpha * op(b) @ op(a)`` with its epilogue; the second value is the input of gelu in ``pre_type``, or None."""
    out_type: DType = type if not is_quantized_type(type) else pre_type if gelu else DType.Float32  # type: ignore[assignment]
    product = custom_product(a, trans_a, b, trans_b, out_type, alpha)
    if product is not None:
        return _finished(product, type, bias, gelu, addend, pre_type)
    block = block_of(a, b)
    shape = (*(b.shape[-1:] if trans_b else b.shape[:-1]), a.shape[0] if trans_a else a.shape[-1])
    quantizer = None if block or addend is not None else emitter(type, shape)
    into = None if addend is None else tex.prim.copy(tex.prim.cast(addend.data, out_type))
    if block and into is not None:
        into = pad(into, block)
    bias_data = None if bias is None else pad_columns(bias.data, block) if block else bias.data
    bias_type = pre_type if gelu else (bias.dtype if bias is not None else out_type)
    # From gelu on: its input (of backward alone), whether this is a gradient, no workspace, whether to add to ``into``, and the split accumulator.
    result = tex.generic_gemm(
        read(a, not trans_a, block), trans_a, read(b, trans_b, block), trans_b, into, quantizer, out_type, bias_data, bias_type, gelu, None, grad,
        None, 0, into is not None, True, alpha=alpha,
    )  # fmt: skip
    data, pre = result[0], result[2]
    if block:
        data, pre = cut(data, shape), cut(pre, shape) if gelu else None
    y = cast_checked(Tensor(data, out_type), type) if quantizer is None else emit(data, type, quantizer)
    return y, plain(pre, pre_type) if gelu else None


def _first(sums: Any, count: int) -> Any:
    """The first ``count`` elements of a vector."""
    return tex.prim.split(sums, [count, sums.shape[0] - count], 0)[0] if sums.shape[0] > count else sums


def _finished(product: Tensor, type: Type, bias: Tensor | None, gelu: bool, addend: Tensor | None, pre_type: DType) -> tuple[Tensor, Any]:
    """The epilogue of ``_gemm``, step by step."""
    z = product if bias is None else add(product, bias, product.type)
    if gelu:
        pre = cast_checked(z, pre_type)
        return cast_checked(Tensor(tex.gelu(pre.data, None), pre_type), type), pre
    return cast_checked(z if addend is None else add(z, addend, z.type), type), None
