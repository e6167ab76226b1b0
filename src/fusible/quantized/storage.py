"""Quantized data without autograd: the fields of a format and what can be done with them."""

from __future__ import annotations

from typing import Any

from fusible import tex
from fusible.errors import ArgumentError, expected
from fusible.tex import DType

__all__ = ["Float8TensorStorage", "QuantizedTensorStorage"]


class QuantizedTensorStorage:
    """Base of the bare storages: ``_dtype`` is the nominal (unquantized) dtype, ``_quantizer`` what made the data."""

    _dtype: Any
    _quantizer: Any


class Float8TensorStorage(QuantizedTensorStorage):
    """One scale for the whole tensor: value = ``_data`` read as ``_fp8_dtype``, times ``_scale_inv``.

    ``_data``: uint8, the tensor's shape, row-wise; ``_transpose``: uint8 ``[last, *leading]``, column-wise; at least one of them is there.
    ``_scale_inv``: fp32 ``[1]``. The fields are real tensors of any device, or lazy ones.
    """

    __slots__ = ("_data", "_dtype", "_fp8_dtype", "_quantizer", "_scale_inv", "_transpose", "_transpose_invalid")

    _scale_inv: Any

    def __init__(
        self,
        *,
        data: Any,
        fp8_scale_inv: Any,
        fp8_dtype: DType,
        fake_dtype: Any = None,
        data_transpose: Any = None,
        quantizer: Any = None,
    ) -> None:
        self._data = data
        self._transpose = data_transpose
        self._transpose_invalid = data_transpose is None
        self._scale_inv = fp8_scale_inv
        self._fp8_dtype = fp8_dtype
        self._dtype = fake_dtype
        self._quantizer = quantizer

    @property
    def shape(self) -> tuple[int, ...]:
        if self._data is not None:
            return tuple(self._data.shape)
        assert self._transpose is not None
        last, *leading = self._transpose.shape
        return (*leading, last)

    @property
    def dtype(self) -> Any:
        return self._dtype

    @property
    def device(self) -> Any:
        return self._scale_inv.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def get_usages(self) -> dict[str, bool]:
        """Which copies are there: ``{"rowwise": ..., "columnwise": ...}``."""
        return {"rowwise": self._data is not None, "columnwise": self._transpose is not None and not self._transpose_invalid}

    def update_usage(self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Make or drop the row-wise and the column-wise copy; None leaves one as it is. The last copy cannot be dropped."""
        has = self.get_usages()
        rowwise = has["rowwise"] if rowwise_usage is None else rowwise_usage
        columnwise = has["columnwise"] if columnwise_usage is None else columnwise_usage
        if not (rowwise or columnwise):
            raise ArgumentError(expected("at least one usage", of="a Float8 tensor", got="neither row-wise nor column-wise", do="keep one"))
        if rowwise and self._data is None:
            self._data = _untransposed(self._transpose, self._fp8_dtype)
        if columnwise and not has["columnwise"]:
            self._transpose = tex.fp8_transpose(self._data, self._fp8_dtype, out=None)
            self._transpose_invalid = False
        if not rowwise:
            self._data = None
        if not columnwise:
            self._transpose, self._transpose_invalid = None, True

    def dequantize(self, *, dtype: Any = None) -> Any:
        """The values in ``dtype`` (default: the nominal dtype)."""
        return tex.dequantize(self, dtype if dtype is not None else self._dtype)

    def get_metadata(self) -> dict[str, Any]:
        """The fields, as the constructor takes them."""
        return {
            "data": self._data,
            "data_transpose": self._transpose,
            "fp8_scale_inv": self._scale_inv,
            "fp8_dtype": self._fp8_dtype,
            "quantizer": self._quantizer,
            "fake_dtype": self._dtype,
        }

    def prepare_for_saving(self) -> tuple[list[Any], Float8TensorStorage]:
        """``([data, transpose, scale_inv], self)`` with the tensors taken out of ``self``; ``restore_from_saved`` puts them back."""
        tensors = [self._data, self._transpose, self._scale_inv]
        self._data = self._transpose = self._scale_inv = None
        return tensors, self

    def restore_from_saved(self, tensors: list[Any]) -> list[Any]:
        """Take this storage's tensors from the front of ``tensors`` and return the rest."""
        self._data, self._transpose, self._scale_inv, *rest = tensors
        return rest

    def clear(self) -> None:
        """Drop the data."""
        self._data = self._transpose = None
        self._transpose_invalid = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._fp8_dtype.name.removeprefix('kFloat8')}, shape={list(self.shape)}, dtype={self._dtype})"


def _untransposed(transpose: Any, fp8_dtype: DType) -> Any:
    last, *leading = transpose.shape
    flat = tex.prim.reshape(transpose, (last, -1 if 0 not in transpose.shape else 0))
    return tex.prim.reshape(tex.fp8_transpose(flat, fp8_dtype, out=None), (*leading, last))
