"""What crosses into NVIDIA's native library and back: enumerations, quantizers, quantized tensors. Numbers pass as they are.

The native library knows NVIDIA's own Python classes alone. Both families bear the same names and keep the same fields, so one rule converts all of
them: the class of the same name, made of the attributes that its constructor asks for.

Its kernels read and write a tensor's memory from the beginning, element after element, in vectors: a tensor with gaps, or that begins elsewhere than
a vector does, crosses as a copy, and what the call wrote is copied back.
"""

from __future__ import annotations

import inspect
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from fusible.errors import NotServedError, expected
from fusible.tex import enums
from fusible.tex.calls.grouped import build_grouped, group_arguments, is_grouped
from fusible.tex.factories import build_quantized
from fusible.tex.protocol import to_dtype, to_torch

__all__ = ["Crossing"]

_PACKAGE = "transformer_engine."
_ATTRIBUTES = {"fp8_dtype": "dtype", "fp4_dtype": "dtype", "rowwise": "rowwise_usage", "columnwise": "columnwise_usage"}
"""Constructor parameters of quantizers whose attribute has another name."""

_FIELDS = {"fp8_scale_inv": "scale_inv", "fake_dtype": "dtype"}
"""Fields of quantized tensors whose name in ``build_quantized`` is another."""

_BUFFERS = ("_data", "_transpose", "_transpose_invalid", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv", "_columnwise_data")
_BUFFERS += ("_columnwise_scale_inv", "_amax_rowwise", "_amax_columnwise")
_GROUPED = ("rowwise_data", "columnwise_data", "scale_inv", "columnwise_scale_inv", "amax", "columnwise_amax", "first_dims", "last_dims")
_GROUPED += ("tensor_offsets",)
_BUFFERS += _GROUPED
"""What a call may replace in a quantized or grouped tensor, of any format."""

_ENUM_PARAMETERS = {
    **dict.fromkeys(("otype", "output_dtype", "D_type", "fp8_dtype", "out_dtype", "q_dtype", "kv_dtype", "qkv_dtype"), "DType"),
    **dict.fromkeys(("qkv_format", "kv_format", "o_format", "do_format", "qkv_scale_inv_format", "do_scale_inv_format"), "NVTE_QKV_Format"),
    **dict.fromkeys(("qkv_layout", "dqkv_layout"), "NVTE_QKV_Layout"),
    "attn_mask_type": "NVTE_Mask_Type",
    "scaling_mode": "NVTEScalingMode",
    "softmax_type": "NVTE_Softmax_Type",
    "comm_type": "CommOverlapType",
}
"""The enumeration that a parameter of this name takes, in every function. Callers may pass a number or a torch dtype."""

_TORCH_DTYPES = frozenset({"dtypes", "fake_dtype"})
"""Parameters that take dtypes of torch, in every function."""

_VECTOR = 16
"""Bytes that a kernel reads at once."""


def _enumeration(function: str, parameter: str) -> str | None:
    if parameter == "bias_type":
        return "NVTE_Bias_Type" if "attn" in function else "DType"
    if parameter == "dtype":
        return "DType" if function.startswith("moe_") or function == "fp8_transpose" else None
    return _ENUM_PARAMETERS.get(parameter)


class Crossing:
    """One call's way into the native library and back. What comes back and had gone in is the very object that went in."""

    def __init__(self, native: ModuleType, classes: ModuleType) -> None:
        self._native, self._classes = native, classes
        self._entered: dict[int, tuple[Any, Any]] = {}

    def enter(self, value: Any, function: str = "", parameter: str = "") -> Any:
        """``value`` as the native library takes it."""
        if value is None or isinstance(value, bool | float | str):
            return value
        if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
            return value if _readable(value) else self._once(value, _laid_out)
        if parameter in _TORCH_DTYPES and not isinstance(value, list | tuple):
            return to_torch(value)
        name = type(value).__name__ if isinstance(value, IntEnum) and hasattr(enums, type(value).__name__) else _enumeration(function, parameter)
        if name is not None and isinstance(value, int | torch.dtype):
            number = int(to_dtype(value)) if isinstance(value, torch.dtype) else int(value)
            return getattr(self._native, name)(number)
        if isinstance(value, list | tuple):
            return type(value)(self.enter(item, function, parameter) for item in value)
        if type(value).__module__.startswith(_PACKAGE):
            return value
        if parameter == "fused_attn_params" and hasattr(value, "qkv_layout"):
            return SimpleNamespace(**{name: self.enter(item, "attn", name) for name, item in vars(value).items()})
        if hasattr(value, "rowwise_usage"):
            return self._once(value, self._quantizer)
        if is_grouped(value):
            return self._once(value, self._grouped)
        return self._once(value, self._storage) if hasattr(value, "get_metadata") else value

    def _once(self, value: Any, convert: Any) -> Any:
        if id(value) not in self._entered:
            self._entered[id(value)] = (value, convert(value))
        return self._entered[id(value)][1]

    def _class(self, value: Any, suffix: str = "") -> type:
        for base in type(value).__mro__:
            found = getattr(self._classes, base.__name__.removesuffix(suffix) + suffix, None)
            if found is not None:
                return found
        do = "use a class that Transformer Engine has, or another backend"
        raise NotServedError(expected("a class that Transformer Engine has", of="the nvidia backend", got=type(value).__qualname__, do=do))

    def _quantizer(self, quantizer: Any) -> Any:
        cls = self._class(quantizer)
        fields = {}
        for name in list(inspect.signature(cls.__init__).parameters)[1:]:
            attribute = _ATTRIBUTES.get(name, name)
            if hasattr(quantizer, attribute):
                fields[name] = getattr(quantizer, attribute)
        if fields.get("amax", 0) is None:  # the native library raises an amax, and does not make one
            fields["amax"] = torch.zeros(1, dtype=torch.float32, device=quantizer.scale.device)
        made = cls(**fields)
        made.internal, made.optimize_for_gemm = quantizer.internal, quantizer.optimize_for_gemm
        return made

    def _storage(self, value: Any) -> Any:
        fields = {
            name: self.enter(item) if name == "quantizer" or type(item) is torch.Tensor else item for name, item in value.get_metadata().items()
        }
        made = self._class(value, "Storage")(**fields)
        if hasattr(value, "_transpose_invalid"):
            made._transpose_invalid = value._transpose_invalid
        return made

    def _grouped(self, value: Any) -> Any:
        cls = getattr(getattr(self._classes, "tensor", None), "GroupedTensorStorage", None)
        if cls is None:
            return value  # unquantized ones are read by their attributes
        return cls(**{name: self.enter(item) if name == "quantizer" else item for name, item in value.get_metadata().items()})

    def leave(self, result: Any, quantizer: Any = None) -> Any:
        """A result of the native library as ours: the caller's own objects, with what the call changed in them, or new ones of ``quantizer``."""
        for original, twin in self._entered.values():
            if type(twin) is torch.Tensor:
                _write_back(original, twin)
                continue
            if hasattr(original, "rowwise_usage"):
                if getattr(original, "amax", 0) is None:
                    original.amax = twin.amax
                continue
            for name in _BUFFERS:
                if hasattr(twin, name):
                    setattr(original, name, self._own(getattr(twin, name)))
        return self._left(result, quantizer)

    def _own(self, value: Any) -> Any:
        """The caller's own object where ``value`` is what it went in as."""
        return next((original for original, twin in self._entered.values() if twin is value), value)

    def _left(self, result: Any, quantizer: Any) -> Any:
        own = self._own(result)
        if own is not result:
            return own
        if result is None or type(result) is torch.Tensor:
            return result
        if isinstance(result, list | tuple):
            several = quantizer if isinstance(quantizer, list | tuple) and len(quantizer) == len(result) else [quantizer] * len(result)
            return type(result)(self._left(item, own) for item, own in zip(result, several, strict=True))
        ours = getattr(enums, type(result).__name__, None)
        if ours is not None and isinstance(ours, type) and issubclass(ours, IntEnum):
            return ours(int(result))
        if quantizer is None or type(quantizer).__module__.startswith(_PACKAGE):
            return result
        if is_grouped(result):
            return _ours(result, quantizer)
        if not hasattr(result, "get_metadata"):
            return result
        fields = {_FIELDS.get(name, name): value for name, value in result.get_metadata().items() if name != "quantizer"}
        fields.setdefault("dtype", getattr(result, "dtype", None) or result._dtype)
        return build_quantized(quantizer, **{"shape": tuple(result.size()), **fields})


def _readable(x: torch.Tensor) -> bool:
    return x.is_contiguous() and not x.data_ptr() % _VECTOR and not x.is_neg() and not x.is_conj()


def _laid_out(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x.detach())


def _write_back(original: torch.Tensor, twin: torch.Tensor) -> None:
    """Nothing is written to a tensor that shows one element at several places. As where a kernel writes itself, autograd is told nothing. What was
    made in inference mode has no version, and is written to in that mode alone."""
    if not all(stride or size <= 1 for size, stride in zip(original.shape, original.stride(), strict=True)):
        return
    uncounted = original.is_inference()
    counting = torch.inference_mode() if uncounted else torch.autograd._unsafe_preserve_version_counter(original)  # pyright: ignore[reportPrivateImportUsage]
    with torch.no_grad(), counting:
        original.copy_(twin)


def _ours(grouped: Any, quantizer: Any) -> Any:
    """A new grouped tensor of the native library, as one of the package that ``quantizer`` belongs to."""
    fields = group_arguments({name: getattr(grouped, name) for name in _GROUPED}, grouped)
    described = {"shape": tuple(grouped.logical_shape), "dtype": grouped.fake_dtype, "num_tensors": grouped.num_tensors, "quantizer": quantizer}
    swizzled = grouped._with_gemm_swizzled_scales
    return build_grouped(quantizer, **described, **fields, with_gemm_swizzled_scales=swizzled)
