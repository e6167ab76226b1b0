"""``Activation``: the base of activations as ops, which save their input and may have options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Unpack

from fusible import nvte
from fusible.errors import ArgumentError, ShapeError, expected
from fusible.nvte import DType
from fusible.nvte.activation import Activation as ActivationForward
from fusible.nvte.activation import ActivationBackward
from fusible.ops.op import Context, Op, OpTypes
from fusible.ops.sharing import Part, Parts, SharesColumns
from fusible.tex.activations import Option
from fusible.tex.interface.domains import domain_of

__all__ = ["Activation", "BlockGate", "check_interleave", "half_width", "take_options"]


class Activation(SharesColumns, Op):
    """An activation: a subclass names its function and the function's backward (wrapped in ``staticmethod``).

    ``cache_quantized_input``: what backward needs of x is kept in E4M3, scaled by its own amax: a byte per element, and a less exact gradient.
    """

    function: ClassVar[ActivationForward]
    gradient: ClassVar[ActivationBackward]
    gated: ClassVar[bool] = False
    rows_alone = True
    quantizes_y = True
    quantizes_dx = True
    x_dtype = DType.BFloat16
    dy_dtype = DType.BFloat16
    y_dtype = DType.Float8E4M3
    dx_dtype = DType.Float8E5M2

    def __init__(self, *, cache_quantized_input: bool = False, **types: Unpack[OpTypes]) -> None:
        super().__init__(**types)
        self.cache_quantized_input = cache_quantized_input

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        x = nvte.cast_checked(x, self.x_dtype)
        return self.activate(x), self.context(x)

    def inference(self, x: nvte.Tensor) -> nvte.Tensor:
        return self.activate(nvte.cast_checked(x, self.x_dtype))

    def backward(self, ctx: Context, dy: nvte.Tensor) -> tuple[nvte.Tensor, list[nvte.Tensor]]:
        dy = nvte.cast_checked(dy, self.dy_dtype)
        return self.differentiate(dy, self.saved(ctx)), []

    def activate(self, x: nvte.Tensor) -> nvte.Tensor:
        """``y``, of an x in its type."""
        return self.function(x, self.y_dtype)

    def differentiate(self, dy: nvte.Tensor, x: nvte.Tensor) -> nvte.Tensor:
        """``dx``, of dy and x in their types."""
        return self.gradient(dy, x, self.dx_dtype)

    def context(self, x: nvte.Tensor) -> Context:
        """What backward needs of x."""
        return {"x": nvte.cast_checked(x, DType.Float8E4M3) if self.cache_quantized_input else x}

    def saved(self, ctx: Context) -> nvte.Tensor:
        """The x of ``context``, in its type; in fp32 where the op takes any and it was kept in 8 bits."""
        if not self.cache_quantized_input:
            return ctx["x"]
        return nvte.dequantize(ctx["x"], DType.Float32 if self.x_dtype is None else nvte.element(self.x_dtype))

    def width(self, width: int | None) -> int | None:
        return half_width(self, width) if self.gated else width

    def parts_of_x(self, y: Parts) -> Parts | None:
        if not self.gated:
            return y
        return (replace(y[0], name="gate"), replace(y[0], name="up")) if len(y) == 1 else None


def half_width(op: Op, width: int | None, block: int = 1) -> int | None:
    """Half of ``width``. Raises ``ShapeError`` where it is no two halves of whole blocks of ``block`` columns."""
    if width is None:
        return None
    if width % (2 * block):
        number = "an even number of" if block == 1 else f"a multiple of {2 * block}"
        raise ShapeError(expected(f"{number} columns", of=f"the input of {op!r}", got=f"{width}", do="give two halves, the gate first"))
    return width // 2


class BlockGate(Activation):
    """``glu_interleave_size`` n: the halves alternate in blocks of n columns, ``[a0 b0 a1 b1 ..]``, in x and in dx. None: they lie side by side."""

    gated = True
    takes: ClassVar[tuple[Option, ...]] = ()
    numbers: tuple[float, ...] = ()
    """The arguments of the functions after the tensors and the type: the values of ``takes``."""

    def __init__(self, *, glu_interleave_size: int | None = None, cache_quantized_input: bool = False, **types: Any) -> None:
        types = take_options(self, self.takes, types)
        super().__init__(cache_quantized_input=cache_quantized_input, **types)
        self.glu_interleave_size = check_interleave(self, glu_interleave_size)

    def activate(self, x: nvte.Tensor) -> nvte.Tensor:
        size = self.glu_interleave_size
        return self.function(x if size is None else nvte.deinterleave(x, size), self.y_dtype, *self.numbers)

    def differentiate(self, dy: nvte.Tensor, x: nvte.Tensor) -> nvte.Tensor:
        size = self.glu_interleave_size
        if size is None:
            return self.gradient(dy, x, self.dx_dtype, *self.numbers)
        dx = self.gradient(dy, nvte.deinterleave(x, size), x.dtype, *self.numbers)
        return nvte.cast_checked(nvte.interleave(dx, size), self.dx_dtype)

    def width(self, width: int | None) -> int | None:
        return half_width(self, width, self.glu_interleave_size or 1)

    def parts_of_x(self, y: Parts) -> Parts | None:
        size = self.glu_interleave_size
        if size is None:
            return super().parts_of_x(y)
        return (Part(y[0].width // size, 2 * size),) if len(y) == 1 and y[0].unit in (1, size) and y[0].width % size == 0 else None

    def extra_repr(self) -> str:
        return "" if self.glu_interleave_size is None else f"glu_interleave_size={self.glu_interleave_size}"


def take_options(op: Op, options: tuple[Option, ...], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Give ``op`` the values of ``options`` among ``arguments``, or their defaults, and return the other arguments. Raises
    ``ArgumentError`` for a value that tex would refuse."""
    for option in options:
        value, (domain, _) = arguments.get(option.name, option.default), domain_of(option.domain)
        if domain is not None:
            domain.check(value, option.name, type(op).__name__)
        setattr(op, option.name, float(value))
    return {name: value for name, value in arguments.items() if name not in {option.name for option in options}}


def check_interleave(op: Op, size: int | None) -> int | None:
    """``size``. Raises ``ArgumentError`` unless it is None or a number of columns."""
    if size is not None and size < 1:
        of = f"glu_interleave_size of {type(op).__name__}"
        raise ArgumentError(expected("a positive number of columns, or None", of=of, got=size, do="give the length of a block"))
    return size
