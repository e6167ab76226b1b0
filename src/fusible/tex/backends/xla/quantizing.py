"""Quantizing lazy tensors, and what else writes quantized results: by formulas, or by a native kernel where that is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusible import lazy
from fusible.lazy import Tensor
from fusible.tex.backends.xla import native
from fusible.tex.backends.xla.arrays import LAZY, fp32
from fusible.tex.backends.xla.block_formats import BLOCKS
from fusible.tex.backends.xla.fp8 import encode, reduced, scale_from_amax, tensor_amax
from fusible.tex.backends.xla.native import Result
from fusible.tex.backends.xla.number_formats import reciprocal
from fusible.tex.factories import build_quantized
from fusible.tex.formats import scheme_of, usages
from fusible.tex.formulas.quantize import Quantizing
from fusible.tex.protocol import fp8_format, to_torch, transposed_shape

__all__ = ["QUANTIZING", "emit", "produce"]


def _raise_amax(quantizer: Any, former: Tensor, amax: Tensor, noop: Tensor | None) -> None:
    amax = lazy.maximum(former, lazy.reshape(amax, former.shape))
    quantizer.amax = amax if noop is None else LAZY.unless(noop, former, amax)


class _Quantizing(Quantizing):
    """Formulas, but for what a kernel does in one read: new tensors with one scale."""

    def tensor(self, x: Any, quantizer: Any, dtype: Any, output: Any = None, noop: Any = None, amax: Any = None) -> Any:
        if output is not None or noop is not None or not scheme_of(quantizer).per_tensor or not native.serves(x):
            return super().tensor(x, quantizer, dtype, output, noop, amax)
        fp8 = int(fp8_format(quantizer.dtype))
        if scheme_of(quantizer).delayed:
            return self._written("quantize", {"src": x, "fp8_dtype": fp8}, x.shape, dtype, quantizer)[0]
        if amax is None:
            amax = tensor_amax(x)
        scale = scale_from_amax(reduced(amax, quantizer), fp8_format(quantizer.dtype), quantizer.force_pow_2_scales, quantizer.amax_epsilon)
        written = native.call("quantize", {"src": x, "fp8_dtype": fp8, "scale": scale, **_copies(x.shape, quantizer)})
        return _built(written, quantizer, x.shape, dtype, scale)

    def produced(
        self, kernel: str, arguments: Mapping[str, Any], shape: Sequence[int], dtype: lazy.dtype, quantizer: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """The result of a native kernel as ``dtype``, or quantized, and what else it writes. Under delayed scaling it writes codes; under any other
        ``dtype`` first, since the scales follow from the result."""
        if quantizer is not None and scheme_of(quantizer).delayed:
            return self._written(kernel, {**arguments, "dtype": int(fp8_format(quantizer.dtype))}, shape, dtype, quantizer)
        written = native.call(kernel, {**arguments, "dst": Result(shape, dtype), "dtype": native.dtype_number(dtype)})
        result = written.pop("dst")
        return (result if quantizer is None else self.tensor(result, quantizer, dtype)), written

    def _written(
        self, kernel: str, arguments: Mapping[str, Any], shape: Sequence[int], dtype: lazy.dtype, quantizer: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """A tensor under delayed scaling, whose scale is known before, and what else the kernel writes."""
        scale = lazy.reshape(quantizer.scale, (1,))
        written = native.call(kernel, {**arguments, **_copies(shape, quantizer), "scale": scale, "amax": Result((1,), lazy.float32)})
        self.observe(quantizer, written.pop("amax"), None)
        return _built(written, quantizer, shape, dtype, scale), written


def _copies(shape: Sequence[int], quantizer: Any) -> dict[str, Result | None]:
    """The copies that a quantizer asks for, as a kernel writes them."""
    rowwise, columnwise = usages(quantizer)
    return {
        "dst": Result(shape, lazy.uint8) if rowwise else None,
        "dst_transposed": Result(transposed_shape(shape), lazy.uint8) if columnwise else None,
    }


def _built(written: dict[str, Tensor], quantizer: Any, shape: Sequence[int], dtype: lazy.dtype, scale: Tensor) -> Any:
    """The quantized tensor of the copies that were written, which are taken out."""
    return build_quantized(
        quantizer,
        shape=tuple(shape),
        dtype=to_torch(dtype),
        data=written.pop("dst", None),
        data_transpose=written.pop("dst_transposed", None),
        scale_inv=reciprocal(scale),
        fp8_dtype=fp8_format(quantizer.dtype),
    )


QUANTIZING = _Quantizing(
    arrays=LAZY,
    blocks=BLOCKS,
    encode=lambda x, scale, dtype: encode(fp32(x) * scale, dtype),
    reciprocal=reciprocal,
    raise_amax=_raise_amax,
    check_same_device=lambda x, like, of: None,  # a program runs on one
)
emit = QUANTIZING.emit
produce = QUANTIZING.produced
