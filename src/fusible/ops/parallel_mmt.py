"""``ParallelMMT``: a product with a weight of which each process of a group holds a part (Shoeybi et al. 2019, arXiv:1909.08053).

With sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) what is not sharded by columns is sharded by rows: ``tokens`` are those of all
processes, and rank r has the r-th ``tokens / processes``.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from fusible import nvte
from fusible.ops.mmt import MMT
from fusible.ops.op import Context
from fusible.ops.protocols import ShardsRows

__all__ = ["ColumnParallelMMT", "ParallelMMT", "RowParallelMMT"]

Gradients = tuple[nvte.Tensor | None, list[nvte.Tensor | None]]


class ParallelMMT(ShardsRows, MMT):
    """Base: ``group`` are the processes (None: all of them), ``sequence_parallel`` says whether rows are shared out too.

    What is gathered and has one scale is quantized before, by the group's largest amax, and passes in 8 bits; so does MXFP8 where each process has
    whole blocks. What else is scaled by blocks is gathered as it is, and quantized then.
    """

    overridable = False
    gathers: ClassVar[Literal["x", "dy"]]
    """Which of ``"x"`` and ``"dy"`` is gathered where rows are shared out."""
    whole_dtype: nvte.Type | None = None
    """The type in which products read what is gathered, in forward or in backward."""

    def __init__(self, weight: nvte.Tensor, *, group: Any = None, sequence_parallel: bool = False, **types: Any) -> None:
        super().__init__(weight, **types)
        self.group, self.sequence_parallel = group, sequence_parallel
        if sequence_parallel:
            self.reshards = "gathers" if self.gathers == "x" else "scatters"
        vars(self).update(self.resolved({name: getattr(self, name) for name in ("x_dtype", "dy_dtype")}))

    def resolved(self, types: dict[str, Any]) -> dict[str, Any]:
        """Its neighbour hands over what is gathered in a type that can be, and unquantized where none can."""
        if not self.sequence_parallel:
            return types
        name = f"{self.gathers}_dtype"
        part = nvte.over(types[name], self.group)
        return {**types, name: part, "whole_dtype": types[name] if part is None else part}

    def part(self, x: nvte.Tensor) -> nvte.Tensor:
        """The process's own rows of what is gathered, as they are sent."""
        type, whole = self.type_of(self.gathers), self.whole_dtype
        if type is None and isinstance(whole, nvte.QuantizedType):
            x = nvte.cast_checked(x, self.activation)
            return nvte.cast(x, whole) if nvte.has_own_blocks(x.shape, whole) else x
        x = nvte.cast_checked(x, type)
        nvte.share_amax(type, self.group)
        return x

    def gathered(self, part: nvte.Tensor, *, rowwise: bool, columnwise: bool) -> nvte.Tensor:
        """The rows of all processes, for products that read them along these dimensions."""
        type = self.whole_dtype
        if isinstance(type, nvte.QuantizedType):
            type = type.read(rowwise=rowwise, columnwise=columnwise)
        return nvte.cast_checked(nvte.all_gather(part, self.group, rowwise=rowwise, columnwise=columnwise), type)

    def summed(self, partial: nvte.Tensor) -> nvte.Tensor:
        """The sum over the group of what each process has of a product: all of it, or the process's own rows."""
        return nvte.reduce_scatter(partial, self.group) if self.sequence_parallel else nvte.all_reduce(partial, self.group)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{', sequence_parallel' if self.sequence_parallel else ''}"


class ColumnParallelMMT(ParallelMMT):
    """``y = x @ weight.T`` with ``weight [N / processes, K]``, ``y [tokens, N / processes]``; ``dx`` = the sum of all ``dy @ weight``.

    ``x`` and ``dx`` are ``[tokens, K]``, the same in every process; with sequence parallelism ``[tokens / processes, K]``. Then backward gathers
    ``x`` once more, and between the passes each process keeps its own rows alone.
    """

    quantizes_dx = False
    gathers = "x"

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        if not self.sequence_parallel:
            return super().forward(x)
        part = self.part(x)
        y, ctx = super().forward(self.gathered(part, rowwise=True, columnwise=False))
        return y, {**ctx, "x": nvte.by_columns(part)} if "x" in ctx else ctx

    def inference(self, x: nvte.Tensor) -> nvte.Tensor:
        return super().inference(self.gathered(self.part(x), rowwise=True, columnwise=False) if self.sequence_parallel else x)

    def backward(self, ctx: Context, dy: nvte.Tensor) -> Gradients:
        if self.sequence_parallel and "x" in ctx:
            ctx = {**ctx, "x": self.gathered(ctx["x"], rowwise=False, columnwise=True)}
        dx, grads = super().backward(ctx, dy)
        return None if dx is None else self.summed(dx), grads


class RowParallelMMT(ParallelMMT):
    """``y`` = the sum of all ``x @ weight.T`` with ``x [tokens, K / processes]``, ``weight [N, K / processes]``; ``dx = dy @ weight``.

    ``y`` and ``dy`` are ``[tokens, N]``, the same in every process; with sequence parallelism ``[tokens / processes, N]``.
    """

    quantizes_y = False
    gathers = "dy"

    def forward(self, x: nvte.Tensor) -> tuple[nvte.Tensor, Context]:
        y, ctx = super().forward(x)
        return self.summed(y), ctx

    def inference(self, x: nvte.Tensor) -> nvte.Tensor:
        return self.summed(super().inference(x))

    def backward(self, ctx: Context, dy: nvte.Tensor) -> Gradients:
        if self.sequence_parallel:
            dy = self.gathered(self.part(dy), rowwise=self.wants("x"), columnwise=self.wants("weight"))
        return super().backward(ctx, dy)
