"""Quantizers: how one tensor is quantized. Attribute names are the protocol that every tex backend reads."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from copy import copy, deepcopy
from typing import Any, ClassVar, Self

import torch

from fusible import tex
from fusible.errors import DTypeError, NotServedError, check_number, expected
from fusible.quantized import block_recipes, recipe
from fusible.quantized.arguments import AnyTensor, Device, DTypeLike, NoopFlag, QuantizerLike, Sizes, Source, Storage, Target, check_methods
from fusible.quantized.first_scale import FirstScale
from fusible.quantized.formats import FP8_MAX
from fusible.quantized.parts import write_part
from fusible.quantized.saving import register_saved
from fusible.quantized.storage import Float8TensorStorage, QuantizedTensorStorage, note_written
from fusible.quantized.tensors import Float8Tensor
from fusible.tex import DType
from fusible.tex.calls.constructors import check_constructor
from fusible.tex.formats import CURRENT, DELAYED, FLOAT8, Scheme, format_of
from fusible.tex.formulas.arrays import Array
from fusible.tex.protocol import check_shape

__all__ = ["Float8CurrentScalingQuantizer", "Float8Quantizer", "Quantizer", "kind_of_quantizer"]


_ANY_SHAPE = (128, 128)
"""A shape that every format can have."""


class Quantizer:
    """Base of all quantizers.

    ``rowwise_usage`` and ``columnwise_usage`` say which copies to make; ``internal`` asks for the bare storage instead of a ``torch.Tensor``.

    A custom quantizer is a subclass whose property ``custom`` is True, and which overrides ``quantize_impl`` (or ``quantize``) and, to be written to,
    ``update_quantized``. It makes a ``QuantizedTensorStorage`` that has ``data``, ``scale``, ``data_t``, ``scale_t``, ``original_shape`` and
    ``dtype``, a ``shape`` or ``size()``, and the methods ``dequantize``, ``prepare_for_saving`` and ``restore_from_saved``. Its ``qgemm`` multiplies.
    """

    internal: bool = False
    optimize_for_gemm: bool = False

    _SCHEME: ClassVar[Scheme | None] = None
    """How it scales; None where no backend of tex knows."""
    _RECIPE: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_constructor(cls)
        check_methods(cls)

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise

    @property
    def custom(self) -> bool:
        """Whether this is a user's quantizer, which no backend of tex knows."""
        return False

    def quantize(self, tensor: Source, *, out: Storage | None = None, dtype: DTypeLike | None = None) -> Any:
        """``tensor`` quantized into a new quantized tensor, or into ``out``. Differentiable: the gradient passes through.

        ``dtype`` is for subclasses that can be asked for another nominal dtype.
        """
        if isinstance(tensor, QuantizedTensorStorage):
            tensor = tensor.dequantize()
        if out is not None:
            written = self.update_quantized(tensor, out)
            note_written(out)
            return written
        if not self.internal and isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            return _Quantize.apply(tensor, self)
        return self.quantize_impl(tensor)

    def __call__(self, tensor: Source, *, out: Storage | None = None) -> Any:
        """``quantize``."""
        return self.quantize(tensor) if out is None else self.quantize(tensor, out=out)

    def quantize_impl(self, tensor: Source) -> Any:
        """``tensor`` quantized into a new quantized tensor."""
        self._refuse_custom("quantize_impl")
        return tex.quantize(tensor, self, None, None)

    def multi_quantize(self, list_of_tensors: Iterable[Any]) -> list[Any]:
        """Each tensor quantized. Raises ``DTypeError`` where one is none, before any is quantized."""
        if not hasattr(list_of_tensors, "__iter__") or isinstance(list_of_tensors, str | torch.Tensor):
            raise self._no_tensors("list_of_tensors", list_of_tensors)
        tensors = list(list_of_tensors)
        for place, tensor in enumerate(tensors):
            if not (hasattr(tensor, "shape") and hasattr(tensor, "dtype")):
                raise self._no_tensors(f"list_of_tensors[{place}]", tensor)
        return [self.quantize(tensor) for tensor in tensors]

    def _no_tensors(self, place: str, got: Any) -> DTypeError:
        of = f"{place} of {type(self).__name__}.multi_quantize"
        return DTypeError(expected("a list of tensors" if "[" not in place else "a tensor", of=of, got=type(got).__qualname__, do="pass one"))

    def update_quantized(self, src: Source, dst: Target, *, noop_flag: NoopFlag | None = None) -> Any:
        """Quantize ``src`` into ``dst``; nothing is written where ``noop_flag[0] == 1``. A part of a tensor of one scale is written by the scale of
        that tensor, as by its ``quantize_``."""
        self._refuse_custom("update_quantized")
        if _is_part(dst) and self._SCHEME is not None and self._SCHEME.format is format_of(dst):
            check_shape(src, dst.shape, f"src of {type(self).__name__}.update_quantized")
            return write_part(dst, src, noop_flag)
        return tex.quantize(src, self, dst, noop_flag)

    def make_empty(
        self,
        shape: Sizes,
        *,
        dtype: DTypeLike | None = torch.float32,
        device: Device | None = "cpu",
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """A quantized tensor of unspecified values."""
        made = self._made_empty(shape, dtype, device, pin_memory)
        return made.requires_grad_(True) if requires_grad else made

    def _made_empty(self, shape: Iterable[int], dtype: DTypeLike | None, device: Device | None, pin_memory: bool) -> Any:
        self._refuse_custom("make_empty")
        return tex.create_empty_quantized_tensor(self, list(shape), dtype, torch.device("cpu" if device is None else device), pin_memory)

    def inner_tensor_specs(self, shape: Sizes) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor that a quantized tensor of ``shape`` consists of, by attribute, in the order of ``__tensor_flatten__``."""
        empty = self.make_empty(shape, device="meta")
        names, _ = empty.__tensor_flatten__()
        return {name: (tuple(getattr(empty, name).shape), getattr(empty, name).dtype) for name in names}

    def storage_metadata(self, fake_dtype: DTypeLike) -> dict[str, Any]:
        """``{"cls": class, "nontensor_kwargs": arguments}`` of the tensors that this quantizer makes: everything but their inner tensors, and
        independent of shape."""
        _, metadata = self.make_empty(_ANY_SHAPE, dtype=fake_dtype, device="meta").__tensor_flatten__()
        return {"cls": metadata["cls"], "nontensor_kwargs": {**metadata["nontensor_kwargs"], "quantizer": self}}

    def alloc_tensors(self, shape: Sizes, *, device: Device | None = None) -> dict[str, torch.Tensor]:
        """The tensors of ``inner_tensor_specs``, of unspecified values."""
        device = torch.device(device if device is not None else "cpu")
        return {name: torch.empty(size, dtype=dtype, device=device) for name, (size, dtype) in self.inner_tensor_specs(shape).items()}

    def create_metadata(self, shape: Sizes, *, dtype: DTypeLike | None, requires_grad: bool = False) -> dict[str, Any]:
        """What ``__tensor_unflatten__`` needs beside the tensors to make one of ``shape``."""
        return {**self.storage_metadata(dtype), "is_tensor": not self.internal, "requires_grad": requires_grad and not self.internal}

    def calibrate(self, tensor: Source) -> None:
        """Update this quantizer's state as quantizing ``tensor`` would. It has none, unless a subclass says so."""

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Change which copies are made; None leaves one as it is."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        """Which copies are made: ``{"rowwise": ..., "columnwise": ...}``."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def with_usages(self, *, rowwise: bool, columnwise: bool) -> Self:
        """A quantizer like this one that makes these copies as a ``torch.Tensor``: itself where it already does. Where both are False, the usages
        stay."""
        usages = {"rowwise": rowwise, "columnwise": columnwise} if rowwise or columnwise else self.get_usages()
        if usages == self.get_usages() and not self.internal:
            return self
        other = self.copy()
        other.set_usage(**usages)
        other.internal = False
        return other

    def is_quantizable(self, inp: AnyTensor) -> bool:
        """Whether ``inp`` can be quantized without padding, and its shards gathered after that."""
        return True

    def is_requantization_safe(self) -> bool:
        """Whether quantizing a tensor again gives the same values: not where there is state, or chance."""
        return False

    def supports_only_rowwise_all_gather(self) -> bool:
        """Whether column-wise data cannot be gathered."""
        return False

    def _get_compatible_recipe(self) -> type[Any] | None:
        """The class of recipes that make this quantizer, or None."""
        return getattr(recipe, self._RECIPE, None) or getattr(block_recipes, self._RECIPE, None)

    def _refuse_custom(self, method: str) -> None:
        if self.custom:
            do = "override it"
            raise NotServedError(expected(f"a {method} of its own", of=f"the custom quantizer {type(self).__name__}", got="none", do=do))

    def copy(self) -> Self:
        """A quantizer with the same options, sharing the same scale and amax."""
        return copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = memo[id(self)] = copy(self)
        for name, value in vars(self).items():
            if name != "amax_reduction_group":  # a process group is not data
                setattr(other, name, deepcopy(value, memo))
        return other

    def quantizes_like(self, other: Any) -> bool:
        """Whether ``other`` quantizes to the same values, whatever copies each makes and whatever their devices."""
        if self is other or type(self) is not type(other):
            return self is other
        here, there = (copy(quantizer.with_usages(rowwise=True, columnwise=True)) for quantizer in (self, other))
        if hasattr(here, "device"):
            here.device = there.device  # type: ignore[attr-defined]
        return None not in (here._value_key(), there._value_key()) and here == there

    def _value_key(self) -> Hashable:
        """The key by which two quantizers of one class are equal; None for a quantizer with state, which is equal to itself alone."""
        options = {"internal": self.internal, "optimize_for_gemm": self.optimize_for_gemm, **vars(self)}
        return tuple((name, _hashable(value)) for name, value in sorted(options.items()))

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


check_methods(Quantizer)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, quantizer: Quantizer) -> Any:
        return quantizer.quantize_impl(tensor.detach())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


def _hashable(value: Any) -> Hashable:
    return (value.dtype, tuple(value.flatten().tolist())) if isinstance(value, torch.Tensor) else value


def _is_part(x: Any) -> bool:
    """Whether it is a part of a quantized tensor, in whose memory it lies."""
    part = getattr(x, "_part", None)
    return part is not None and part.whole is not None


def _fp8(dtype: int) -> DType:
    if dtype not in FP8_MAX:
        raise DTypeError(expected("kFloat8E4M3 or kFloat8E5M2", of="a quantizer's fp8_dtype", got=repr(dtype), do="name one of the two"))
    return DType(dtype)


class Float8Quantizer(Quantizer):
    """Quantize by a given scale: ``q = cast(x * scale)``, saturating; ``amax = max(amax, max|x|)`` is recorded (delayed scaling).

    ``scale``: fp32 ``[1]``; ``amax``: fp32 ``[1]``, updated in place, or None: then the backend assigns a new tensor to the attribute.
    Until an iteration has observed a weight that ``quantized_model_init`` made (``first_scale``), both follow from what is quantized.
    """

    first_scale: FirstScale | None = None

    def __init__(
        self, scale: Array, amax: Array | None, fp8_dtype: int, *, rowwise: bool = True, columnwise: bool = True, internal: bool = False
    ) -> None:
        self.scale: Any = scale
        self.amax: Any = amax
        self.dtype = _fp8(fp8_dtype)
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = internal

    _SCHEME = DELAYED
    _RECIPE = "DelayedScaling"

    def calibrate(self, tensor: Source) -> None:
        """Record the amax of ``tensor``: of none where it is empty. Raises ``DTypeError`` for one that is not quantized."""
        tensor = tensor.dequantize() if isinstance(tensor, QuantizedTensorStorage) else tensor
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16) or tensor.is_meta:
            got = f"one of {tensor.dtype} on {tensor.device}"
            raise DTypeError(expected("a tensor of fp32, fp16 or bf16 with data", of="tensor of Float8Quantizer.calibrate", got=got, do="cast it"))
        if not tensor.numel():
            return
        seen = tensor.detach().abs().amax().to(torch.float32).reshape(1)
        if self.amax is None:
            self.amax = seen
        else:
            self.amax.copy_(torch.maximum(self.amax, seen))

    def quantize_impl(self, tensor: Source) -> Any:
        self._fit(tensor, None)
        return super().quantize_impl(tensor)

    def update_quantized(self, src: Source, dst: Target, *, noop_flag: NoopFlag | None = None) -> Any:
        if not _is_part(dst):
            self._fit(src, noop_flag)
        return super().update_quantized(src, dst, noop_flag=noop_flag)

    def _fit(self, values: Any, noop_flag: Any) -> None:
        first = self.first_scale
        if first is None or first.observed or not values.numel() or (noop_flag is not None and bool(noop_flag.view(-1)[0] == 1)):
            return
        first.fit(self, values.detach().abs().amax().float().reshape(1))
        first.fitted = True

    def supports_only_rowwise_all_gather(self) -> bool:
        return True

    def quantizes_like(self, other: Any) -> bool:
        """Whether ``other`` quantizes to this format: each tensor carries its own scale."""
        return type(self) is type(other) and self.dtype == other.dtype

    def take_state_of(self, other: QuantizerLike) -> None:
        """Take over the scale of ``other`` and the amax that it has recorded; in place, where both are tensors. Raises ``DTypeError`` for a quantizer
        without them."""
        if not (hasattr(other, "scale") and hasattr(other, "amax")):
            of, got = "other of Float8Quantizer.take_state_of", type(other).__name__
            raise DTypeError(expected("a quantizer with a scale and an amax", of=of, got=got, do="pass a Float8Quantizer"))
        for name in ("scale", "amax"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor) and mine is not theirs:
                mine.copy_(theirs.view_as(mine))
        first, of_other = self.first_scale, getattr(other, "first_scale", None)
        if first is not None and first is not of_other:
            first.fitted = of_other is None or of_other.fitted

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
        check_number(amax_epsilon, f"amax_epsilon of {type(self).__name__}", least=0)
        self.amax_epsilon = amax_epsilon
        self.internal = internal

    _SCHEME = CURRENT
    _RECIPE = "Float8CurrentScaling"

    def is_requantization_safe(self) -> bool:
        return True

    def supports_only_rowwise_all_gather(self) -> bool:
        return True


def _make_float8(quantizer: Quantizer, *, shape: Sequence[int], dtype: torch.dtype, scale_inv: Array, fp8_dtype: int, **copies: Array | None) -> Any:
    fields: dict[str, Any] = {**copies, "fp8_scale_inv": scale_inv, "fp8_dtype": DType(fp8_dtype), "quantizer": quantizer}
    if quantizer.internal or not isinstance(scale_inv, torch.Tensor):
        return Float8TensorStorage(fake_dtype=dtype, **fields)
    return Float8Tensor(tuple(shape), dtype, **fields)


def kind_of_quantizer(quantizer: Any) -> tuple[Any, ...]:
    """What dispatch sees of a quantizer."""
    return quantizer._SCHEME.name, quantizer.dtype, 2 * quantizer.rowwise_usage + quantizer.columnwise_usage


def _storage_kind(storage: Float8TensorStorage) -> tuple[Any, ...]:
    data = storage._data if storage._data is not None else storage._transpose
    return FLOAT8.name, data.device.type if isinstance(data, torch.Tensor) else "lazy", storage._fp8_dtype


for _class in (Float8Quantizer, Float8CurrentScalingQuantizer):
    tex.register_factory(_class, _make_float8)
    tex.register_kind(_class, kind_of_quantizer)
for _class in (Float8TensorStorage, Float8Tensor):
    tex.register_kind(_class, _storage_kind)
register_saved(Float8Quantizer, Float8CurrentScalingQuantizer)
