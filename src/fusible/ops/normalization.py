"""``LayerNorm``, ``RMSNorm`` and ``L2Normalization``."""

from __future__ import annotations

import math
from typing import Unpack

from fusible import nvte
from fusible.errors import ShapeError, check_number, expected
from fusible.nvte import DType
from fusible.ops.op import Context, Op, OpTypes, check_width

__all__ = ["L2Normalization", "LayerNorm", "RMSNorm"]


class _Norm(Op):
    quantizes_y = True

    def __init__(
        self,
        weight: nvte.Tensor,
        *,
        eps: float,
        zero_centered_gamma: bool,
        x_dtype: nvte.Type | None,
        weight_dtype: nvte.Type | None,
        dy_dtype: nvte.Type | None,
        y_dtype: nvte.Type,
        dx_dtype: nvte.Type,
    ) -> None:
        check_number(eps, f"eps of {type(self).__name__}", least=0)
        self.weight = weight
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.x_dtype = x_dtype
        self.weight_dtype = weight_dtype
        self.dy_dtype = dy_dtype
        self.y_dtype = y_dtype
        self.dx_dtype = dx_dtype

    def width(self, width: int | None) -> int | None:
        check_width(self, self.weight.shape[-1], width)
        return width

    @property
    def over(self) -> tuple[int, ...]:
        """The last dimensions of x, over which it is normalized together."""
        return tuple(self.weight.shape)

    def rows(self, x: nvte.Tensor) -> nvte.Tensor:
        """``x [*, *over]`` with one column for each element of ``over``. Raises ``ShapeError`` where x ends otherwise."""
        over = self.over
        if len(over) == 1:
            return x
        if tuple(x.shape[-len(over) :]) != over:
            wanted = f"the last dimensions {list(over)}"
            raise ShapeError(expected(wanted, of=f"the input of {self!r}", got=f"shape {list(x.shape)}", do="give a tensor that ends so"))
        return nvte.reshape(x, (*x.shape[: -len(over)], math.prod(over)))

    def columns(self, parameter: nvte.Tensor) -> nvte.Tensor:
        """A parameter, of the shape ``over``, as a number for each column."""
        return parameter if len(parameter.shape) == 1 else nvte.reshape(parameter, (math.prod(parameter.shape),))

    @property
    def row_dtype(self) -> nvte.Type:
        """What is computed of rows; blocks in 8 bits would not stay what they are in the shape of x."""
        return self.y_dtype if len(self.over) == 1 else self.activation

    def in_shape(self, y: nvte.Tensor, x: nvte.Tensor) -> nvte.Tensor:
        """What was computed of rows, in the shape of x."""
        return y if len(self.over) == 1 else nvte.cast_checked(nvte.reshape(y, x.shape), self.y_dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}" if len(self.over) == 1 else f"{self.over}"


class LayerNorm(_Norm):
    """``y = (x - mean) * rsigma * weight + bias`` over the columns (Ba et al. 2016, arXiv:1607.06450), or over as many of the last dimensions
    together as ``weight`` and ``bias`` have.

    ``rsigma = 1 / sqrt(var + eps)``; ``weight + 1`` stands for ``weight`` where ``zero_centered_gamma``.
    """

    def __init__(
        self,
        weight: nvte.Tensor,
        bias: nvte.Tensor,
        *,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        x_dtype: nvte.Type | None = DType.BFloat16,
        weight_dtype: nvte.Type | None = None,
        bias_dtype: nvte.Type | None = None,
        dy_dtype: nvte.Type | None = DType.BFloat16,
        y_dtype: nvte.Type = DType.Float8E4M3,
        dx_dtype: nvte.Type = DType.BFloat16,
    ) -> None:
        super().__init__(
            weight,
            eps=eps,
            zero_centered_gamma=zero_centered_gamma,
            x_dtype=x_dtype,
            weight_dtype=weight_dtype,
            dy_dtype=dy_dtype,
            y_dtype=y_dtype,
            dx_dtype=dx_dtype,
        )
        self.bias = bias
        self.bias_dtype = bias_dtype

    @property
    def args(self) -> list[nvte.Tensor]:
        return [self.weight, self.bias]

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        x = nvte.cast_checked(x, self.x_dtype)
        weight = nvte.cast_checked(self.weight, self.weight_dtype)
        bias = nvte.cast_checked(self.bias, self.bias_dtype)
        rows, weight, bias = self.rows(x), self.columns(weight), self.columns(bias)
        y, mu, rsigma = nvte.layernorm(rows, weight, bias, self.eps, self.zero_centered_gamma, self.row_dtype)
        return self.in_shape(y, x), self.context(rows, weight, mu, rsigma)

    def context(self, x: nvte.Tensor, weight: nvte.Tensor, mu: nvte.Tensor, rsigma: nvte.Tensor) -> Context:
        return {"x": x, "weight": weight, "mu": mu, "rsigma": rsigma}

    def backward(self, ctx: Context, dy: nvte.Tensor, addend: nvte.Tensor | None = None) -> tuple[nvte.Tensor, list[nvte.Tensor]]:
        """``addend``: what is added to dx before it is rounded."""
        dy = nvte.cast_checked(dy, self.dy_dtype)
        saved = self.rows(dy), ctx["x"], ctx["mu"], ctx["rsigma"], ctx["weight"], self.zero_centered_gamma
        if addend is None:
            dx, dweight, dbias = nvte.dlayernorm(*saved, self.dx_dtype)
        else:
            dx, dweight, dbias = nvte.dlayernorm_add(*saved, self.rows(addend), self.dx_dtype)
        if len(self.over) == 1:
            return dx, [dweight, dbias]
        return nvte.reshape(dx, dy.shape), [nvte.reshape(grad, self.over) for grad in (dweight, dbias)]


class RMSNorm(_Norm):
    """``y = x * rsigma * weight`` with ``rsigma = 1 / sqrt(mean(x^2) + eps)`` (Zhang and Sennrich 2019, arXiv:1910.07467), over the columns, or
    over as many of the last dimensions together as ``weight`` has.

    ``weight + 1`` stands for ``weight`` where ``zero_centered_gamma``.
    """

    def __init__(
        self,
        weight: nvte.Tensor,
        *,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        x_dtype: nvte.Type | None = DType.BFloat16,
        weight_dtype: nvte.Type | None = None,
        dy_dtype: nvte.Type | None = DType.BFloat16,
        y_dtype: nvte.Type = DType.Float8E4M3,
        dx_dtype: nvte.Type = DType.BFloat16,
    ) -> None:
        super().__init__(
            weight,
            eps=eps,
            zero_centered_gamma=zero_centered_gamma,
            x_dtype=x_dtype,
            weight_dtype=weight_dtype,
            dy_dtype=dy_dtype,
            y_dtype=y_dtype,
            dx_dtype=dx_dtype,
        )

    @property
    def args(self) -> list[nvte.Tensor]:
        return [self.weight]

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        x = nvte.cast_checked(x, self.x_dtype)
        weight = nvte.cast_checked(self.weight, self.weight_dtype)
        rows, weight = self.rows(x), self.columns(weight)
        y, rsigma = nvte.rmsnorm(rows, weight, self.eps, self.zero_centered_gamma, self.row_dtype)
        return self.in_shape(y, x), self.context(rows, weight, rsigma)

    def context(self, x: nvte.Tensor, weight: nvte.Tensor, rsigma: nvte.Tensor) -> Context:
        return {"x": x, "weight": weight, "rsigma": rsigma}

    def backward(self, ctx: Context, dy: nvte.Tensor, addend: nvte.Tensor | None = None) -> tuple[nvte.Tensor, list[nvte.Tensor]]:
        """``addend``: what is added to dx before it is rounded."""
        dy = nvte.cast_checked(dy, self.dy_dtype)
        saved = self.rows(dy), ctx["x"], ctx["rsigma"], ctx["weight"], self.zero_centered_gamma
        if addend is None:
            dx, dweight = nvte.drmsnorm(*saved, self.dx_dtype)
        else:
            dx, dweight = nvte.drmsnorm_add(*saved, self.rows(addend), self.dx_dtype)
        if len(self.over) == 1:
            return dx, [dweight]
        return nvte.reshape(dx, dy.shape), [nvte.reshape(dweight, self.over)]


class L2Normalization(Op):
    """``y = x / sqrt(sum(x^2) + eps)`` over the columns: rows of length 1."""

    quantizes_y = True
    x_dtype = DType.BFloat16
    dy_dtype = DType.BFloat16
    y_dtype = DType.Float8E4M3

    def __init__(self, *, eps: float = 1e-6, **types: Unpack[OpTypes]) -> None:
        super().__init__(**types)
        check_number(eps, "eps of L2Normalization", least=0)
        self.eps = eps

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        x = nvte.cast_checked(x, self.x_dtype)
        y, rsigma = nvte.l2norm(x, self.eps, self.y_dtype)
        return y, self.context(x, rsigma)

    def context(self, x: nvte.Tensor, rsigma: nvte.Tensor) -> Context:
        return {"x": x, "rsigma": rsigma}

    def backward(self, ctx: Context, dy: nvte.Tensor) -> tuple[nvte.Tensor, list[nvte.Tensor]]:
        dy = nvte.cast_checked(dy, self.dy_dtype)
        return nvte.dl2norm(dy, ctx["x"], ctx["rsigma"], self.dx_dtype), []

    def extra_repr(self) -> str:
        return f"eps={self.eps:g}"
