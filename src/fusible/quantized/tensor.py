"""Quantized tensors that are torch tensors: they stand wherever a tensor stands, and dequantize for whatever does not know them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from fusible.quantized.storage import Float8TensorStorage

__all__ = ["Float8Tensor", "QuantizedTensor"]

_aten = torch.ops.aten


class QuantizedTensor(torch.Tensor):
    """Base of the quantized tensors: any operation that does not know the format sees the dequantized values."""

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        raise NotImplementedError

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> QuantizedTensor:
        raise NotImplementedError

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.detach.default:
            return args[0]._like(requires_grad=False)
        if func is _aten.clone.default:
            return args[0]._copied()
        if func is _aten.copy_.default and isinstance(args[0], QuantizedTensor):
            source = args[1].dequantize() if isinstance(args[1], QuantizedTensor) else args[1]
            return args[0].quantize_(source)
        written = [a for a, s in zip(args, func._schema.arguments, strict=False) if s.alias_info is not None and s.alias_info.is_write]
        plain = {id(t): t.dequantize() for t in _quantized_in((args, kwargs))}
        result = func(*tree_map(lambda a: plain.get(id(a), a), args), **tree_map(lambda a: plain.get(id(a), a), kwargs))
        for tensor in written:
            if isinstance(tensor, QuantizedTensor):
                tensor.quantize_(plain[id(tensor)])
        if written and isinstance(written[0], QuantizedTensor):
            return written[0]
        return result

    def _like(self, *, requires_grad: bool) -> QuantizedTensor:
        raise NotImplementedError

    def _copied(self) -> QuantizedTensor:
        raise NotImplementedError


def _quantized_in(tree: Any) -> list[QuantizedTensor]:
    leaves, _ = tree_flatten(tree)
    return [leaf for leaf in leaves if isinstance(leaf, QuantizedTensor)]


class Float8Tensor(QuantizedTensor):
    """A ``torch.Tensor`` of a nominal dtype whose data is 8-bit with one scale (see ``Float8TensorStorage`` for the fields)."""

    _data: torch.Tensor | None
    _transpose: torch.Tensor | None
    _transpose_invalid: bool
    _scale_inv: torch.Tensor
    _quantizer: Any
    _fp8_dtype: Any
    _dtype: torch.dtype

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        data: torch.Tensor | None,
        fp8_scale_inv: torch.Tensor,
        fp8_dtype: Any,
        data_transpose: torch.Tensor | None = None,
        quantizer: Any = None,
        requires_grad: bool = False,
    ) -> Float8Tensor:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=fp8_scale_inv.device, requires_grad=requires_grad)
        self._data = data
        self._transpose = data_transpose
        self._transpose_invalid = data_transpose is None
        self._scale_inv = fp8_scale_inv
        self._fp8_dtype = fp8_dtype
        self._quantizer = quantizer
        self._dtype = dtype
        return self

    get_usages = Float8TensorStorage.get_usages
    update_usage = Float8TensorStorage.update_usage
    get_metadata = Float8TensorStorage.get_metadata

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values in ``dtype`` (default: the nominal dtype). Differentiable: the gradient passes through."""
        return _Dequantize.apply(self, dtype if dtype is not None else self._dtype)  # pyright: ignore[reportReturnType]

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> Float8Tensor:
        """Overwrite this tensor's data with ``tensor``, quantized by this tensor's quantizer."""
        self._quantizer.update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def storage_without_autograd(self) -> Float8TensorStorage:
        """The same data as a bare storage."""
        return Float8TensorStorage(**self.get_metadata())

    def _like(self, *, requires_grad: bool) -> Float8Tensor:
        fields = self.get_metadata()
        dtype = fields.pop("fake_dtype")
        return Float8Tensor(tuple(self.shape), dtype, requires_grad=requires_grad, **fields)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def _copied(self) -> Float8Tensor:
        fields = {name: field.clone() if isinstance(field, torch.Tensor) else field for name, field in self.get_metadata().items()}
        dtype = fields.pop("fake_dtype")
        return Float8Tensor(tuple(self.shape), dtype, **fields)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Float8Tensor({self._fp8_dtype.name.removeprefix('kFloat8')}, data={self.dequantize()})"


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Float8Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.storage_without_autograd().dequantize(dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None
