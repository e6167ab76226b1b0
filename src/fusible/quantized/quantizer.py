"""Quantizers: how one tensor is quantized. Attribute names are the protocol that every tex backend reads."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from copy import copy
from typing import Any

import torch

from fusible import tex
from fusible.errors import DTypeError, expected
from fusible.quantized.formats import FP8_MAX
from fusible.quantized.storage import Float8TensorStorage
from fusible.quantized.tensor import Float8Tensor
from fusible.tex import DType

__all__ = ["Float8CurrentScalingQuantizer", "Float8Quantizer", "Quantizer"]


class Quantizer:
    """Base of all quantizers.

    ``rowwise_usage`` and ``columnwise_usage`` say which copies to make; ``internal`` asks for the bare storage instead of a ``torch.Tensor``.
    """

    internal: bool = False
    optimize_for_gemm: bool = False

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise

    def quantize(self, tensor: Any, *, out: Any = None) -> Any:
        """``tensor`` quantized into a new quantized tensor, or into ``out``."""
        return tex.quantize(tensor, self, out, None)

    __call__ = quantize

    def update_quantized(self, src: Any, dst: Any, *, noop_flag: Any = None) -> Any:
        """Quantize ``src`` into ``dst``; nothing is written where ``noop_flag[0] == 1``."""
        return tex.quantize(src, self, dst, noop_flag)

    def make_empty(self, shape: Iterable[int], *, dtype: Any = torch.float32, device: Any = "cpu", pin_memory: bool = False) -> Any:
        """A quantized tensor of unspecified values."""
        return tex.create_empty_quantized_tensor(self, list(shape), dtype, torch.device(device), pin_memory)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Change which copies are made; None leaves one as it is."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def copy(self) -> Quantizer:
        """A quantizer with the same options, sharing the same scale and amax."""
        return copy(self)

    def _value_key(self) -> Hashable:
        """What makes two quantizers of one class the same; None where each is itself, having state of its own."""
        return tuple((name, _hashable(value)) for name, value in sorted(vars(self).items()))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        key = self._value_key()
        return self is other or (key is not None and key == other._value_key())

    def __hash__(self) -> int:
        key = self._value_key()
        return object.__hash__(self) if key is None else hash((type(self), key))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({DType(getattr(self, 'dtype', 0)).name}, rowwise={self.rowwise_usage}, columnwise={self.columnwise_usage})"


def _hashable(value: Any) -> Hashable:
    return (value.dtype, tuple(value.flatten().tolist())) if isinstance(value, torch.Tensor) else value


def _fp8(dtype: int) -> DType:
    if dtype not in FP8_MAX:
        raise DTypeError(expected("kFloat8E4M3 or kFloat8E5M2", of="a quantizer's fp8_dtype", got=repr(dtype), do="name one of the two"))
    return DType(dtype)


class Float8Quantizer(Quantizer):
    """Quantize by a given scale: ``q = cast(x * scale)``, saturating; ``amax = max(amax, max|x|)`` is recorded (delayed scaling).

    ``scale``: fp32 ``[1]``; ``amax``: fp32 ``[1]``, updated in place, or None: then the backend assigns a new tensor to the attribute.
    """

    def __init__(
        self, scale: Any, amax: Any, fp8_dtype: int, *, rowwise: bool = True, columnwise: bool = True, internal: bool = False
    ) -> None:
        self.scale = scale
        self.amax = amax
        self.dtype = _fp8(fp8_dtype)
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = internal

    def _value_key(self) -> None:
        return None


class Float8CurrentScalingQuantizer(Quantizer):
    """Quantize by the tensor's own amax: ``scale = fp8_max / max(max|x|, amax_epsilon)``.

    A non-finite or zero amax gives scale 1; ``force_pow_2_scales`` rounds the scale down to a power of two; ``with_amax_reduction`` takes the amax's
    maximum over ``amax_reduction_group``.
    """

    def __init__(
        self,
        fp8_dtype: int,
        device: Any = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        internal: bool = False,
    ) -> None:
        self.dtype = _fp8(fp8_dtype)
        self.device = device
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = amax_epsilon
        self.internal = internal


def _make_float8(quantizer: Quantizer, *, shape: Any, dtype: Any, data: Any, data_transpose: Any, scale_inv: Any, fp8_dtype: Any) -> Any:
    fields = {"data": data, "data_transpose": data_transpose, "fp8_scale_inv": scale_inv, "fp8_dtype": DType(fp8_dtype), "quantizer": quantizer}
    if quantizer.internal or not isinstance(scale_inv, torch.Tensor):
        return Float8TensorStorage(fake_dtype=dtype, **fields)
    return Float8Tensor(tuple(shape), dtype, **fields)


def _kind(scaling: str) -> Any:
    def describe(quantizer: Any) -> tuple[Any, ...]:
        return scaling, quantizer.dtype, 2 * quantizer.rowwise_usage + quantizer.columnwise_usage

    return describe


def _storage_kind(storage: Any) -> tuple[Any, ...]:
    held = storage._data if storage._data is not None else storage._transpose
    return "float8", held.device.type if isinstance(held, torch.Tensor) else "lazy", storage._fp8_dtype


for _class, _scaling in ((Float8Quantizer, "delayed"), (Float8CurrentScalingQuantizer, "current")):
    tex.register_factory(_class, _make_float8)
    tex.register_kind(_class, _kind(_scaling))
for _class in (Float8TensorStorage, Float8Tensor):
    tex.register_kind(_class, _storage_kind)
