"""The data that matrix products read of their operands, and products of tensors that a user's own quantizer made."""

from __future__ import annotations

from typing import Any

from fusible import tex
from fusible.errors import DTypeError, expected
from fusible.nvte.casting import by_columns, dequantize
from fusible.nvte.dtype import DType, QuantizedType, is_quantized_type
from fusible.nvte.frameworks import te_to_torch_dtype
from fusible.nvte.padding import is_padded, pad
from fusible.nvte.tensor import Tensor
from fusible.quantized import GEMMParams, GEMMType
from fusible.tex.protocol import outer

__all__ = ["custom_product", "is_custom", "read"]


def read(x: Tensor, columnwise: bool, block: int = 0) -> Any:
    """What tex is given of an operand that is read along its columns, or along its rows. ``block``: what both operands are multiples of, where one is
    padded (``block_of``), else 0; one that has too few zeros behind it gets them, where it is quantized the values of the copy that is read."""
    type = x.type
    if block and not is_quantized_type(type):
        return pad(x.data, block)
    if block:
        shape = x.data.shape if is_padded(x) else x.shape
        if shape[-1] % block or outer(shape) % block:
            return pad(dequantize(by_columns(x) if columnwise else x, DType.Float32).data, block)
    return x.data.operand(columnwise) if type.__class__ is QuantizedType and type.applied else x.data  # type: ignore[union-attr]


def is_custom(x: Tensor) -> bool:
    """Whether a user's own quantizer made ``x``."""
    return x.type.__class__ is QuantizedType and x.type.scaling == "custom"  # type: ignore[union-attr]


def custom_product(a: Tensor, trans_a: bool, b: Tensor, trans_b: bool, type: DType, alpha: float = 1.0) -> Tensor | None:
    """``alpha * op(b) @ op(a)`` by the quantizer's own ``qgemm``, which takes both operands with their product's dimension last; None where no user's
    quantizer made them.

    Raises ``DTypeError`` where one made the one operand alone.
    """
    if not (is_custom(a) or is_custom(b)):
        return None
    if not (is_custom(a) and is_custom(b)):
        do = "quantize both by quantizers of your own, or neither"
        raise DTypeError(expected("two operands of custom quantizers", of="a matrix product", got=f"{b!r} and {a!r}", do=do))
    kind = GEMMType.WGRAD if trans_b else GEMMType.FPROP if trans_a else GEMMType.DGRAD
    (x, x_scale), (w, w_scale) = _along(b.data, trans_b), _along(a.data, not trans_a)
    out_dtype = te_to_torch_dtype(type)
    params = GEMMParams(out_dtype=out_dtype)
    y = b.data._quantizer.qgemm(x, w, params, out_dtype, x_scale, w_scale, None, gemm_type=kind, qresult_x=b.data, qresult_w=a.data)
    if not trans_b:
        y = y.view(*b.shape[:-1], y.shape[-1])
    return Tensor(tex.prim.scale(y, alpha, type) if alpha != 1.0 else tex.prim.cast(y, type), type)


def _along(data: Any, columnwise: bool) -> tuple[Any, Any]:
    return (data.data_t, data.scale_t) if columnwise else (data.data, data.scale)
