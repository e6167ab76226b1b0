"""``MMT``: the product with a transposed weight, the matrix part of a linear layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, Unpack

from fusible import nvte
from fusible.nvte import DType, QuantizedType
from fusible.ops.op import Context, Op, OpTypes, check_width
from fusible.ops.types_by_name import Reads

__all__ = ["MMT"]

T = TypeVar("T")


class MMT(Op):
    """``y = x @ weight.T`` with ``x [tokens, K]``, ``weight [N, K]``; ``dx = dy @ weight``, ``dweight = dy.T @ x``."""

    rows_alone = True
    quantizes_y = True
    quantizes_dx = True
    overridable = True
    sums_dbias: bool = True
    """Whether the product that gives the weight's gradient can sum that of a bias, which is added to y, too."""
    x_dtype = DType.Float8E4M3
    weight_dtype: nvte.Type | None = DType.Float8E4M3
    dy_dtype = DType.Float8E5M2
    dweight_dtype: nvte.DType = DType.BFloat16

    def __init__(self, weight: nvte.Tensor, **types: Unpack[OpTypes]) -> None:
        super().__init__(**types)
        self.weight = weight

    @property
    def args(self) -> list[nvte.Tensor]:
        return [self.weight]

    def operands(self, x: nvte.Tensor) -> tuple[nvte.Tensor, nvte.Tensor]:
        """``x`` and the weight in the types of the product."""
        if self.override == "high_precision":
            memo = nvte.current_pass().memo
            assert memo is not None
            memo["operands", self.position] = x, self.weight
        return nvte.cast_checked(x, self.x_dtype), nvte.cast_checked(self.weight, self.weight_dtype)

    def context(self, x: nvte.Tensor, weight: nvte.Tensor) -> Context:
        """What backward needs of the operands: x for dweight, the weight for dx. Under an ``override``, what they were made of, or their values."""
        if self.override == "high_precision":
            memo = nvte.current_pass().memo
            assert memo is not None
            x, weight = memo.pop(("operands", self.position))
        ctx: Context = {}
        if self.wants("weight"):
            ctx["x"] = nvte.by_columns(x)
        if self.wants("x"):
            ctx["weight"] = weight if self._by_rows(weight.type) else nvte.by_columns(weight)
        return ctx

    def _by_rows(self, type: nvte.Type) -> bool:
        """Whether backward works on the values of an operand's row-wise copy, which forward has read: where a weight is held by rows alone, and where
        dy is not in the operand's format, for the values of a column-wise copy, which was quantized apart, would be others."""
        if not isinstance(type, QuantizedType) or not type.rowwise or not type.copies_differ:
            return False
        return type.by_rows_alone or not isinstance(self.dy_dtype, QuantizedType) or self.dy_dtype.scaling != type.scaling

    @property
    def reads(self) -> dict[str, Reads]:
        x, weight = self.wants("x"), self.wants("weight")
        if self.override is not None:
            return {"x": Reads(True, False), "weight": Reads(True, False)}
        return {"x": Reads(True, weight), "weight": Reads(True, x), "dy": Reads(x, weight)}

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        x, weight = self.operands(x)
        return nvte.matmul_transpose(x, weight, self.y_dtype), self.context(x, weight)

    def inference(self, x: nvte.Tensor) -> nvte.Tensor:
        return nvte.matmul_transpose(*self.operands(x), self.y_dtype)

    def backward(self, ctx: Context, dy: nvte.Tensor, addend: nvte.Tensor | None = None) -> tuple[nvte.Tensor | None, list[nvte.Tensor | None]]:
        """``addend [tokens, K]``: added to dx before it is rounded."""
        dy = self.taken(dy)
        if not self.wants("weight"):
            return self.dx(ctx, dy, addend), [None]
        dx, dweight = self.products(ctx, dy, lambda x: self.dweight(dy, x), addend)
        return dx, [dweight]

    def products(
        self, ctx: Context, dy: nvte.Tensor, of_weight: Callable[[nvte.Tensor], T], addend: nvte.Tensor | None = None
    ) -> tuple[nvte.Tensor | None, T]:
        """dx, and what the weight's product gives: ``of_weight(x)`` of x as that reads it. It comes first, so that x goes before dx comes."""
        found = of_weight(self.taken_x(ctx))
        return self.dx(ctx, dy, addend), found

    def taken(self, dy: nvte.Tensor) -> nvte.Tensor:
        """``dy`` as backward's products read it."""
        return nvte.cast_checked(dy, self.dy_dtype)

    def taken_x(self, ctx: Context) -> nvte.Tensor:
        """x as the product of the weight's gradient reads it."""
        return self.operand(ctx["x"])

    def dx(self, ctx: Context, dy: nvte.Tensor, addend: nvte.Tensor | None = None) -> nvte.Tensor | None:
        """``dy @ weight + addend``, where anyone needs it."""
        if not self.wants("x"):
            return None
        weight = self.operand(ctx["weight"])
        if addend is None:
            return nvte.matmul(dy, weight, self.dx_dtype)
        return nvte.matmul_add(dy, weight, addend, self.dx_dtype)

    def operand(self, x: nvte.Tensor) -> nvte.Tensor:
        """An operand of the forward product as backward's products take it: its values under an ``override``, and where ``_by_rows``."""
        values = nvte.is_quantized_type(x.type) and (self.override is not None or self._by_rows(x.type))
        return nvte.dequantize(x, self.activation) if values else x

    def dweight(self, dy: nvte.Tensor, x: nvte.Tensor, alpha: float = 1.0) -> nvte.Tensor:
        """``alpha * dy.T @ x``, added to what the running pass has of it already, where it has something."""
        so_far = self.dweight_so_far
        if so_far is None:
            return nvte.transpose_matmul(dy, x, self.dweight_dtype, alpha)
        return nvte.transpose_matmul_add(dy, x, so_far, alpha)

    @property
    def dweight_so_far(self) -> nvte.Tensor | None:
        return nvte.current_pass().sums.get(f"{self.position}.weight")

    def width(self, width: int | None) -> int | None:
        columns, expects = self.weight.shape
        check_width(self, expects, width)
        return columns

    def extra_repr(self) -> str:
        return "{1} -> {0}".format(*self.weight.shape)
