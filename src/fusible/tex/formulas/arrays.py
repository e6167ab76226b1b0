"""The array functions that formulas are written in, and what else they ask of a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from fusible.tex.protocol import QuantizerLike

if TYPE_CHECKING:
    import torch

    from fusible import lazy

__all__ = ["Array", "ArrayKernels", "Arrays", "Fp8", "Function"]

Function = Callable[..., Any]
"""A function; the field that holds it documents its arguments."""


Array: TypeAlias = "torch.Tensor | lazy.Tensor"
"""A plain tensor of one framework: every formula serves both."""


class Fp8(Protocol):
    """A framework's module of FP8 bytes: what it has for the formulas."""

    def encode(self, x: Any, dtype: Any) -> Any:
        """fp32 -> uint8, to nearest even, saturating, NaN kept; perhaps in the memory of ``x``."""

    def decode(self, data: Any, fp8_dtype: Any) -> Any:
        """uint8 -> fp32, exactly; a new tensor."""

    def tensor_amax(self, x: Any) -> Any:
        """``max |x|``, fp32 ``[1]``; NaN where an element is NaN, 0 for an empty tensor."""

    def scale_from_amax(self, amax: Any, dtype: Any, power_of_two: bool, epsilon: float) -> Any:
        """The fp32 scale that takes ``amax`` to the largest number of the format."""

    def reduced(self, amax: Any, quantizer: Any) -> Any:
        """The amaxes of current scaling, the largest of all processes where ``quantizer`` asks for it."""

    def transpose_bytes(self, data: Any) -> Any:
        """``[*leading, last] -> [last, *leading]``."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """A framework's functions of its own tensors, which have operators, slices, ``shape`` and ``dtype``. There is one value of each framework.

    ``in place``: the function may write its result to the memory of its first argument, which must be a tensor that the formula itself has made.
    """

    fp8: Fp8
    float32: Any
    dtype: Function
    """``(dtype)``: the framework's own of any dtype that ``tex.protocol.to_torch`` takes."""
    accumulator: Function
    """``(dtype)``: the dtype that is computed in, of operands of ``dtype``."""
    index: Any
    """The integers that places are counted in."""
    cast: Function
    """``(x, dtype)``."""
    wide: Function
    """``(x)`` in the dtype that is computed in."""
    times: Function
    """``(x, y)``: ``x y``, in place."""
    plus: Function
    """``(x, y)``: ``x + y``, in place."""
    plus_product: Function
    """``(x, y, z)``: ``x + y z``, in place."""
    product_minus: Function
    """``(x, y, z)``: ``y z - x``, in place."""
    minus: Function
    """``(x, y)``: ``x - y``, in place."""
    minus_product: Function
    """``(x, y, z)``: ``x - y z``, in place."""
    over: Function
    """``(x, y)``: ``x / y``, in place."""
    sqrt: Function
    """``(x)``, in place."""
    exp: Function
    """``(x)``, in place."""
    hidden: Function
    """``(x, visible, value)``: ``value`` where not ``visible``, else ``x``, in place; ``visible`` may be overwritten, too."""
    plus_scaled_square: Function
    """``(x, y, factor)``: ``x + factor y^2``, in place."""
    plus_scaled: Function
    """``(x, y, factor)``: ``x + factor y``, a new tensor."""
    minus_scaled: Function
    """``(x, y, factor)``: ``x - factor y``, a new tensor."""
    maximum: Function
    bitcast: Function
    """``(x, dtype)``: the same bits as elements of ``dtype``, which has the same width."""
    shift_right: Function
    """``(x, count)`` of integers; nothing is said of the bits that move in."""
    all_finite: Function
    arange: Function
    """``(count, dtype, like)``: 0, 1, .. where ``like`` is."""
    full: Function
    """``(shape, value, dtype, like)``: a new tensor where ``like`` is."""
    reshape: Function
    """``(x, shape)``."""
    transpose: Function
    """``(x)``: the transpose of a matrix."""
    permute: Function
    """``(x, dims)``, perhaps a view."""
    concatenate: Function
    """``(xs, axis)``."""
    stack: Function
    """``(xs, axis)``."""
    split: Function
    """``(x, sizes, axis)``."""
    halves: Function
    """``(x)``: the two halves of the last dimension, wide."""
    sum: Function
    """``(x, axis)``."""
    mean: Function
    """``(x)``: the mean over the last dimension, which stays as one of size 1."""
    total: Function
    """``(x)``: the sum over the last dimension, which stays as one of size 1."""
    largest: Function
    """``(x)``: the maximum over the last dimension, which stays as one of size 1."""
    log: Function
    erfc: Function
    """``(x)``: ``1 - erf(x)``."""
    take: Function
    """``(x, places)``: the rows at ``places``, in the shape of these."""
    where: Function
    """``(condition, x, y)``."""
    fill: Function
    """``(x, condition, value)``: the number ``value`` where ``condition``, else ``x``, in place."""
    filled: Function
    """``fill`` into a new tensor."""
    clip: Function
    """``(x, least, largest)``: ``x`` clamped to the bounds; None for no bound."""
    relu: Function
    abs: Function
    tanh: Function
    sigmoid: Function
    rsqrt: Function
    softmax: Function
    """``(x)``: along the last dimension."""
    masked: Function
    """``(x, mask)``: ``x`` times bytes of 0 and 1, a new tensor."""
    sin: Function
    cos: Function
    contiguous: Function
    """``(x)``: ``x``, contiguous: itself where it is so already, or where the framework has no strides."""
    copy: Function
    """``(x)``: a contiguous copy that shares no memory with ``x``."""
    unless: Function
    """``(noop, old, new)``: ``old`` where ``noop`` (one number) is 1, else ``new``."""
    set_unless: Function
    """``(flag, condition)``: make one number 1 unless ``condition``, a bool of one element."""
    repeated: Function
    """``(grid, count, axis)``: each row or column ``count`` times."""
    put: Function
    """``(old, new)``: make ``new``, of its shape, rounded to its dtype, the value of the tensor ``old``, which is returned."""


class ArrayKernels:
    """A backend whose kernels are formulas over ``_arrays``: how it reads operands and writes results."""

    _arrays: ClassVar[Arrays]
    _plain: ClassVar[Function]
    """``(x)``: itself, or its value where it is quantized (in its nominal dtype)."""
    _dense: ClassVar[Function]
    """``(x)``: the value of a quantized tensor of any format in fp32."""
    _row_sum: ClassVar[Function]
    """``(x)``: the sum over all rows, wide: ``[*leading, last] -> [last]``."""
    _write: ClassVar[Function]
    """``(result, dtype, out=None)``: ``result`` rounded to ``dtype``; into ``out``, where given."""
    _emit: ClassVar[Function]
    """``(result, quantizer, dtype, output=None)``: a wide ``result`` quantized."""

    def _finish(self, result: Array, quantizer: QuantizerLike | None, dtype: Any) -> Any:
        """A wide ``result`` as what the caller asked for: rounded, or quantized."""
        return self._arrays.cast(result, dtype) if quantizer is None else self._emit(result, quantizer, dtype)
