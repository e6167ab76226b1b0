"""``ParallelMMT``: a product with a weight of which each process of a group holds a part (Shoeybi et al. 2019, arXiv:1909.08053).

With sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) what is not sharded by columns is sharded by rows: ``tokens`` are those of all
processes, and rank r has the r-th ``tokens / processes``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal

from fusible import nvte
from fusible.ops.messages import Message, amax_message
from fusible.ops.mmt import MMT, T
from fusible.ops.op import Context, Op
from fusible.ops.protocols import ShardsRows
from fusible.ops.sharing import Process

__all__ = ["ColumnParallelMMT", "ParallelMMT", "RowParallelMMT"]


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

    def __init__(
        self, weight: nvte.Tensor, *, group: Any = None, sequence_parallel: bool = False, process: Process | None = None, **types: Any
    ) -> None:
        super().__init__(weight, **types)
        self.group, self.sequence_parallel, self.process = group, sequence_parallel, process
        self.sums_dbias = not (sequence_parallel and self.gathers == "dy")
        if sequence_parallel:
            self.reshards = "gathers" if self.gathers == "x" else "scatters"
        vars(self).update(self.resolved({name: getattr(self, name) for name in ("x_dtype", "dy_dtype")}))

    @property
    def kind(self) -> type[Op]:
        return MMT

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
        type = self.gathered_type(rowwise=rowwise, columnwise=columnwise)
        return nvte.cast_checked(nvte.all_gather(part, self.group, rowwise=rowwise, columnwise=columnwise), type)

    def gathered_type(self, *, rowwise: bool, columnwise: bool) -> nvte.Type | None:
        """Of what is gathered, for products that read it along these dimensions."""
        type = self.whole_dtype
        return type.read(rowwise=rowwise, columnwise=columnwise) if isinstance(type, nvte.QuantizedType) else type

    def summed(self, partial: nvte.Tensor) -> nvte.Tensor:
        """The sum over the group of what each process has of a product: all of it, or the process's own rows."""
        return nvte.reduce_scatter(partial, self.group) if self.sequence_parallel else nvte.all_reduce(partial, self.group)

    def _of_gathered(self, kind: nvte.PassKind, rows: int, *, rowwise: bool, columnwise: bool, again: bool = False) -> Iterator[Message]:
        """The messages by which what each process has ``rows`` of is gathered. ``again``: in backward, as forward left it."""
        assert self.process is not None
        what, type = self.gathers, self.type_of(self.gathers)
        width = self.weight.shape[1 if what == "x" else 0]
        if type is None:
            type = self.whole_dtype if nvte.has_own_blocks((rows, width), self.whole_dtype) else self.activation
        elif not again:
            yield from amax_message(type, what, kind)
        assert type is not None
        for nbytes in nvte.bytes_gathered((rows, width), type, self.process.size, rowwise=rowwise, columnwise=columnwise):
            yield Message("all_gather", what, nbytes)

    def _of_sum(self, what: str, rows: int, width: int, type: nvte.Type) -> Message:
        nbytes = rows * width * nvte.bit_width(nvte.element(type)) // 8
        return Message("reduce_scatter" if self.sequence_parallel else "all_reduce", what, nbytes)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{', sequence_parallel' if self.sequence_parallel else ''}"


class ColumnParallelMMT(ParallelMMT):
    """``y = x @ weight.T`` with ``weight [N / processes, K]``, ``y [tokens, N / processes]``; ``dx`` = the sum of all ``dy @ weight``.

    ``x`` and ``dx`` are ``[tokens, K]``, the same in every process; with sequence parallelism ``[tokens / processes, K]``. Then backward gathers
    ``x`` once more, and between the passes each process keeps its own rows alone.
    """

    quantizes_dx = False
    gathers = "x"

    def operands(self, x: nvte.Tensor) -> tuple[nvte.Tensor, nvte.Tensor]:
        if not self.sequence_parallel:
            return super().operands(x)
        part = self.part(x)
        memo = nvte.current_pass().memo
        assert memo is not None
        memo["part", self.position] = part
        return super().operands(self.gathered(part, rowwise=True, columnwise=False))

    def context(self, x: nvte.Tensor, weight: nvte.Tensor) -> Context:
        ctx = super().context(x, weight)
        if self.sequence_parallel and "x" in ctx:
            memo = nvte.current_pass().memo
            assert memo is not None
            ctx["x"] = nvte.by_columns(memo.pop(("part", self.position)))
        return ctx

    def products(
        self, ctx: Context, dy: nvte.Tensor, of_weight: Callable[[nvte.Tensor], T], addend: nvte.Tensor | None = None
    ) -> tuple[nvte.Tensor | None, T]:
        """x is gathered while the product of dx is computed, and dx is summed while that of the weight is."""
        gather = self._begin_gather(ctx) if self.sequence_parallel else None
        partial = super().dx(ctx, dy)
        x = super().taken_x(ctx) if gather is None else gather()
        if partial is None:
            return None, of_weight(x)
        sum_ = nvte.begin_sum(partial, self.group, scatter=self.sequence_parallel)
        found = of_weight(x)
        return self._added(sum_.end(), addend), found

    def dx(self, ctx: Context, dy: nvte.Tensor, addend: nvte.Tensor | None = None) -> nvte.Tensor | None:
        partial = super().dx(ctx, dy)
        return None if partial is None else self._added(self.summed(partial), addend)

    def _begin_gather(self, ctx: Context) -> Callable[[], nvte.Tensor]:
        type, underway = self.gathered_type(rowwise=False, columnwise=True), nvte.begin_all_gather(ctx["x"], self.group, rowwise=False)
        return lambda: nvte.cast_checked(underway.end(), type)

    def _added(self, dx: nvte.Tensor, addend: nvte.Tensor | None) -> nvte.Tensor:
        return dx if addend is None else nvte.add(dx, addend, self.dx_dtype)

    def messages(self, kind: nvte.PassKind, rows: int) -> Iterator[Message]:
        if self.process is None:
            return
        if kind == "backward":
            if self.sequence_parallel and self.wants("weight"):
                yield from self._of_gathered(kind, rows, rowwise=False, columnwise=True, again=True)
            if self.wants("x"):
                yield self._of_sum("dx", self.rows_of_y(rows), self.weight.shape[1], self.dx_dtype)
        elif self.sequence_parallel:
            yield from self._of_gathered(kind, rows, rowwise=True, columnwise=False)


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

    def taken(self, dy: nvte.Tensor) -> nvte.Tensor:
        if not self.sequence_parallel:
            return super().taken(dy)
        return self.gathered(self.part(dy), rowwise=self.wants("x"), columnwise=self.wants("weight"))

    def messages(self, kind: nvte.PassKind, rows: int) -> Iterator[Message]:
        if self.process is None:
            return
        if kind != "backward":
            yield self._of_sum("y", rows, self.weight.shape[0], self.y_dtype)
        elif self.sequence_parallel:
            yield from self._of_gathered(kind, self.rows_of_y(rows), rowwise=self.wants("x"), columnwise=self.wants("weight"))
