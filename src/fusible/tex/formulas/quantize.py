"""Quantizing: with one scale for a tensor step by step, in blocks by the format's codec; and what else of tex rests on that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fusible.errors import DTypeError, expected
from fusible.tex.calls.quantize import check_sections, known_amaxes, quantize_each
from fusible.tex.factories import build_quantized
from fusible.tex.formats import FLOAT8, PLAIN, format_of, is_quantized, logical_shape, scheme_of, update_buffers, usages
from fusible.tex.formulas.arrays import Array, ArrayKernels, Arrays, Function
from fusible.tex.formulas.block_formats import BlockTensors
from fusible.tex.interface.arguments import DTypeLike, QuantizedTensor, Tensor
from fusible.tex.interface.quantize import Quantize
from fusible.tex.protocol import QuantizerLike, check_no_part, check_shape, fp8_format, to_torch

__all__ = ["QuantizeFormulas", "Quantizing"]


@dataclass(frozen=True, slots=True)
class Quantizing:
    """How a framework quantizes its tensors."""

    arrays: Arrays
    blocks: BlockTensors
    encode: Function
    """``(x, scale, fp8)``: the bytes of ``cast(x * scale)``, of the shape of ``x``."""
    reciprocal: Function
    raise_amax: Function
    """``(quantizer, former, amax, noop)``: let the amax that the quantizer has, ``former``, be at least ``amax``."""
    check_same_device: Function
    """``(x, like, of)``: raise where the two do not lie on one device."""

    def tensor(
        self, x: Array, quantizer: Any, dtype: Any, output: QuantizedTensor | None = None, noop: Array | None = None, amax: Array | None = None
    ) -> Any:
        """``x`` quantized, its nominal dtype being ``dtype``; into ``output``, where given, unless ``noop[0] == 1``.

        ``amax``: that of current scaling, where it is known.
        """
        scheme = scheme_of(quantizer)
        if scheme.format is PLAIN:
            raise DTypeError(expected("a quantizer", of="quantize", got="None", do="pass a Float8 quantizer"))
        if not scheme.per_tensor:
            return self.blocks.quantize(x, quantizer, dtype, output, noop)
        if output is not None:
            self._check_output(output, x)
        fp8 = fp8_format(quantizer.dtype)
        if scheme.delayed:
            scale = self.arrays.reshape(quantizer.scale, (1,))
            self.observe(quantizer, self.arrays.fp8.tensor_amax(x), noop)
        else:
            amax = self.arrays.fp8.reduced(self.arrays.fp8.tensor_amax(x), quantizer) if amax is None else amax
            scale = self.arrays.fp8.scale_from_amax(amax, fp8, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
        data = self.encode(x, scale, fp8)
        if output is not None:
            return self._fill(output, quantizer, data, self.reciprocal(scale), noop)
        rowwise, columnwise = usages(quantizer)
        return build_quantized(
            quantizer,
            shape=x.shape,
            dtype=to_torch(dtype),
            data=self.arrays.contiguous(data) if rowwise else None,
            data_transpose=self.arrays.fp8.transpose_bytes(data) if columnwise else None,
            scale_inv=self.reciprocal(scale),
            fp8_dtype=fp8,
        )

    def emit(self, result: Array, quantizer: QuantizerLike | None, dtype: Any, output: QuantizedTensor | None = None) -> Any:
        """A kernel's wide ``result`` quantized: by delayed scaling as it is, by the others after rounding to ``dtype``."""
        if not scheme_of(quantizer).delayed:
            result = self.arrays.cast(result, dtype)
        return self.tensor(result, quantizer, dtype, output)

    def observe(self, quantizer: Any, amax: Array, noop: Array | None) -> None:
        """Let a quantizer know the amax of what it quantized."""
        former = quantizer.amax
        if former is None:
            quantizer.amax = amax
        else:
            self.raise_amax(quantizer, former, amax, noop)

    def _check_output(self, output: Tensor, x: Array) -> None:
        if format_of(output) is not FLOAT8:
            got = type(output).__qualname__
            raise DTypeError(expected("a quantized tensor", of="output of quantize", got=got, do="make one by quantizer.make_empty"))
        check_no_part(output, "output of quantize")
        shape = logical_shape(output)
        if shape != tuple(x.shape):
            check_shape(x, shape, "the tensor quantized into output")
        self.check_same_device(output._scale_inv, x, "output of quantize")

    def _fill(self, output: QuantizedTensor, quantizer: QuantizerLike, data: Array, scale_inv: Array, noop: Array | None) -> Any:
        xp = self.arrays

        def put(old: Array | None, new: Array) -> Any:
            return new if old is None else xp.put(old, new if noop is None else xp.unless(noop, old, new))

        update_buffers(output, quantizer, data, self.arrays.fp8.transpose_bytes, put)
        put(output._scale_inv, xp.reshape(scale_inv, output._scale_inv.shape))
        return output


class QuantizeFormulas(ArrayKernels, Quantize):
    _quantizing: ClassVar[Quantizing]
    """As of every class of kernels."""

    def quantize(self, tensor: Tensor, quantizer: QuantizerLike | None, output: QuantizedTensor | None = None, noop: Array | None = None) -> Any:
        x = self._plain(tensor)
        return self._quantizing.tensor(x, quantizer, x.dtype, output, noop)

    def dequantize(self, input: QuantizedTensor, otype: DTypeLike) -> Any:
        if not is_quantized(input):
            raise DTypeError(expected("a quantized tensor", of="dequantize", got=type(input).__qualname__, do="quantize it first, or cast it"))
        return self._arrays.contiguous(self._arrays.cast(self._dense(input), self._arrays.dtype(otype)))

    def bgrad_quantize(self, input: Tensor, quantizer: QuantizerLike | None) -> list[Any]:
        x = self._plain(input)
        bias_grad = self._arrays.cast(self._row_sum(x), x.dtype)
        return [bias_grad, input if quantizer is None else self._quantizing.tensor(x, quantizer, x.dtype)]

    def multi_tensor_quantize(self, tensor_list: Sequence[Any], quantizer_list: Sequence[Any]) -> list[Any]:
        return quantize_each(self.quantize, tensor_list, quantizer_list, "multi_tensor_quantize")

    def split_quantize(self, tensor: Tensor, split_sections: Sequence[int], quantizer_list: Sequence[Any]) -> list[Any]:
        x, sections = self._plain(tensor), list(split_sections)
        check_sections(sections, x, quantizer_list)
        return self.multi_tensor_quantize(list(self._arrays.split(x[: sum(sections)], sections, 0)), quantizer_list)

    def nvfp4_quantize_with_amax(self, tensor: Tensor, quantizer: QuantizerLike, rowwise_amax: Array, columnwise_amax: Array) -> Any:
        x, xp = self._plain(tensor), self._arrays
        known = known_amaxes(x, quantizer, rowwise_amax, columnwise_amax, xp.float32)
        amaxes = {way: xp.copy(xp.reshape(amax, shape)) for way, (amax, shape) in known.items()}
        return self._quantizing.blocks.quantize(x, quantizer, x.dtype, amaxes=amaxes)
