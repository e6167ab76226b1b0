"""The affine transformation, with weights and inputs that may be quantized."""

from __future__ import annotations

from typing import Any

from fusible.errors import ArgumentError, DTypeError, check_switch, expected
from fusible.lazy import dtypes
from fusible.lazy.frontend import Tensor
from fusible.lazy.locate import shows_user
from fusible.lazy.modules.checks import check_sizes, check_trailing, float_dtype
from fusible.lazy.modules.module import Module
from fusible.lazy.modules.parameter import ANY, DefaultParameter
from fusible.lazy.ops.cast import cast
from fusible.lazy.ops.matmul import dot_general
from fusible.lazy.ops.quantize import dequantize, quantize
from fusible.lazy.ops.reductions import widened

__all__ = ["Linear"]

_QUANTIZED = (dtypes.int8, dtypes.int4, dtypes.float8)


class Linear(Module):
    """``x @ weight.T + bias`` with ``weight`` ``[out_features, in_features]`` and ``bias`` ``[out_features]`` (or ``None``), of ``dtype``, a float.

    With ``quant_dtype`` (int8, int4 or float8) the weight is quantized with ``weight_scale`` and dequantized before the product. Without
    ``weight_quant_dim`` the scale is one number, or one for each block of rows, ``[out_features / block, in_features]``; with it one number for each
    element of that dimension (0: output features, 1: input features). A weight that is of ``quant_dtype`` already is only dequantized. Where
    ``input_scale``, a scalar, has a value, the input is quantized and dequantized with it. Scales are of ``dtype``; without ``quant_dtype`` they are
    ``None``.

    16-bit floats accumulate in float32, bias included, and round once. Raises ``DTypeError`` for another ``quant_dtype`` and
    ``ArgumentError`` for a ``weight_quant_dim`` that is neither 0 nor 1, or stands without ``quant_dtype``.
    """

    weight: Tensor
    bias: Tensor | None
    weight_scale: Tensor | None = None
    input_scale: Tensor | None = None

    @shows_user
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: dtypes.dtype = dtypes.float32,
        quant_dtype: dtypes.dtype | None = None,
        weight_quant_dim: int | None = None,
    ) -> None:
        check_sizes("Linear", in_features=in_features, out_features=out_features)
        self.dtype = float_dtype("Linear", dtype)
        if quant_dtype not in (None, *_QUANTIZED):
            raise DTypeError(expected("int8, int4, float8 or None", of="quant_dtype of Linear", got=repr(quant_dtype), do="pass one of these"))
        if weight_quant_dim is not None and (quant_dtype is None or weight_quant_dim not in (0, 1)):
            wanted, do = ("0, 1 or None", "name a dimension of the weight") if quant_dtype else ("None", "pass a quant_dtype beside it")
            raise ArgumentError(expected(wanted, of="weight_quant_dim of Linear", got=weight_quant_dim, do=do))
        self.in_features = in_features
        self.out_features = out_features
        self.quant_dtype = quant_dtype
        self.weight_quant_dim = weight_quant_dim
        shape = (out_features, in_features)
        self.weight = DefaultParameter(shape, dtype, alternatives=[(shape, quant_dtype)] if quant_dtype else [])
        check_switch(bias, "bias of Linear")
        self.bias = DefaultParameter(out_features, dtype) if bias else None
        if quant_dtype is not None:
            blocks = [((ANY, in_features), dtype)] if weight_quant_dim is None else []
            self.weight_scale = DefaultParameter(() if weight_quant_dim is None else shape[weight_quant_dim], dtype, alternatives=blocks)
            self.input_scale = DefaultParameter((), dtype, optional=True)

    def forward(self, x: Any) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        check_trailing("Linear", x, (self.in_features,), self.dtype)
        weight = self.weight
        if self.quant_dtype is not None:
            if not isinstance(self.input_scale, DefaultParameter):
                x = dequantize(quantize(x, self.input_scale, self.quant_dtype), self.input_scale, self.dtype)
            if weight.dtype is self.dtype:
                weight = quantize(weight, self.weight_scale, self.quant_dtype, self.weight_quant_dim)
            weight = dequantize(weight, self.weight_scale, self.dtype, self.weight_quant_dim)
        contracting = ((x.ndim - 1,), (1,))
        if self.bias is None:
            return dot_general(x, weight, contracting)
        bias = widened(self.bias)
        return cast(dot_general(x, weight, contracting, dtype=bias.dtype) + bias, self.dtype)
