"""``LayerNorm``, ``RMSNorm`` and ``L2Normalization``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Unpack

from fusible import nvte
from fusible.errors import ShapeError, check_number, expected
from fusible.nvte import DType
from fusible.ops.op import Context, Op, OpTypes, check_width

__all__ = ["L2Normalization", "LayerNorm", "RMSNorm"]


class _Norm(Op):
    rows_alone = True
    quantizes_y = True
    x_dtype = DType.BFloat16
    weight_dtype: nvte.Type | None = None
    dy_dtype = DType.BFloat16
    y_dtype = DType.Float8E4M3

    def __init__(self, weight: nvte.Tensor, *, eps: float = 1e-5, zero_centered_gamma: bool = False, **types: Unpack[OpTypes]) -> None:
        super().__init__(**types)
        check_number(eps, f"eps of {type(self).__name__}", least=0)
        self.weight = weight
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma

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
        """The type of the result on rows: unquantized where it is reshaped to x afterwards, as blocks would not survive that."""
        return self.y_dtype if len(self.over) == 1 else self.activation

    def in_shape(self, y: nvte.Tensor, x: nvte.Tensor) -> nvte.Tensor:
        """A result ``y`` on rows, reshaped to the shape of x."""
        return y if len(self.over) == 1 else nvte.cast_checked(nvte.reshape(y, x.shape), self.y_dtype)

    def _gradients(
        self,
        gradient: Callable[..., Any],
        gradient_add: Callable[..., Any],
        dy: nvte.Tensor,
        saved: tuple[nvte.Tensor, ...],
        addend: nvte.Tensor | None,
    ) -> tuple[nvte.Tensor, list[nvte.Tensor]]:
        """dx and those of the parameters, by one of the backward's functions."""
        dy = nvte.cast_checked(dy, self.dy_dtype)
        operands = self.rows(dy), *saved, self.zero_centered_gamma
        dx, *grads = gradient(*operands, self.dx_dtype) if addend is None else gradient_add(*operands, self.rows(addend), self.dx_dtype)
        return (dx, grads) if len(self.over) == 1 else (nvte.reshape(dx, dy.shape), [nvte.reshape(grad, self.over) for grad in grads])

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}" if len(self.over) == 1 else f"{self.over}"


class LayerNorm(_Norm):
    """``y = (x - mean) * rsigma * weight + bias`` over the columns (Ba et al. 2016, arXiv:1607.06450), or over as many of the last dimensions
    together as ``weight`` and ``bias`` have.

    ``rsigma = 1 / sqrt(var + eps)``; ``weight + 1`` stands for ``weight`` where ``zero_centered_gamma``.
    """

    bias_dtype: nvte.Type | None = None

    def __init__(
        self, weight: nvte.Tensor, bias: nvte.Tensor, *, eps: float = 1e-5, zero_centered_gamma: bool = False, **types: Unpack[OpTypes]
    ) -> None:
        super().__init__(weight, eps=eps, zero_centered_gamma=zero_centered_gamma, **types)
        self.bias = bias

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
        saved = ctx["x"], ctx["mu"], ctx["rsigma"], ctx["weight"]
        return self._gradients(nvte.dlayernorm, nvte.dlayernorm_add, dy, saved, addend)


class RMSNorm(_Norm):
    """``y = x * rsigma * weight`` with ``rsigma = 1 / sqrt(mean(x^2) + eps)`` (Zhang and Sennrich 2019, arXiv:1910.07467), over the columns, or
    over as many of the last dimensions together as ``weight`` has.

    ``weight + 1`` stands for ``weight`` where ``zero_centered_gamma``.
    """

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
        return self._gradients(nvte.drmsnorm, nvte.drmsnorm_add, dy, (ctx["x"], ctx["rsigma"], ctx["weight"]), addend)


class L2Normalization(Op):
    """``y = x / sqrt(sum(x^2) + eps)`` over the columns: rows of length 1."""

    rows_alone = True
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
