"""``Op``: an operation with its backward, oblivious of framework, executor and neighbours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any, TypedDict, Unpack

from fusible import nvte
from fusible.errors import ShapeError, expected
from fusible.ops.binding import PlanBinding
from fusible.ops.traits import OpTraits
from fusible.ops.types_by_name import OpTypesByName
from fusible.tex.calls.argument_kinds import Kind
from fusible.tex.calls.constructors import check_constructor

__all__ = ["Context", "Op"]

Context = dict[str, nvte.Tensor]
"""The tensors that a forward saves for its backward, by names that are identifiers."""


_NVTE = SimpleNamespace(Tensor=Kind("an nvte.Tensor", lambda x: isinstance(x, nvte.Tensor)))


class OpTypes(TypedDict, total=False):
    """The types of an op in the place of those of its class, as keywords of its constructor; of parameters those that it has."""

    x_dtype: nvte.Type | None
    dy_dtype: nvte.Type | None
    y_dtype: nvte.Type
    dx_dtype: nvte.Type
    weight_dtype: nvte.Type | None
    dweight_dtype: nvte.DType
    bias_dtype: nvte.Type | None
    dbias_dtype: nvte.DType


class Op(OpTraits, PlanBinding, OpTypesByName, ABC):
    """A practically atomic operation.

    It holds parameters (``nvte.Tensor``) and options, never auxiliary tensors. What is to be known of it beside its passes are three things: what its
    class declares (``OpTraits``), what a plan has bound on its copy (``PlanBinding``), and which type it takes what in (``OpTypesByName``). What only
    few ops have is in ``ops.protocols``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_constructor(cls, {"nvte": _NVTE})

    def __init__(self, **types: Unpack[OpTypes]) -> None:
        unknown = [name for name in types if name not in OpTypes.__annotations__ or not hasattr(type(self), name)]
        if unknown:
            raise TypeError(f"{type(self).__name__} takes no argument {min(unknown)!r}")
        vars(self).update(types)

    def context(self, *args: Any, **kwargs: Any) -> Context:
        """What backward needs. The method's parameters name the tensors of which it is made; there are none where backward needs nothing."""
        return {}

    @abstractmethod
    def forward(self, x: nvte.Tensor) -> Any:
        """``(y, ctx)``."""

    @abstractmethod
    def backward(self, ctx: Context, dy: nvte.Tensor) -> Any:
        """``(dx, grads)``. Reads tensors from ``ctx`` alone, never from the op's own parameters, which may have changed since."""

    def inference(self, x: nvte.Tensor, **values: Any) -> nvte.Tensor:
        """``y`` alone. The default runs forward."""
        return self.forward(x, **values)[0]

    def width(self, width: int | None) -> int | None:
        """The width of y for an x of ``width`` columns; None where it is not known before the call. Raises ``ShapeError`` for a width that the op
        cannot take."""
        return width

    @property
    def kind(self) -> type[Op]:
        """The class by which its scales are known again, whichever share of it a process computes."""
        return type(self)

    @property
    def title(self) -> str:
        """The name that an explanation shows."""
        return type(self).__name__

    def extra_repr(self) -> str:
        """The options that ``repr`` shows in parentheses."""
        return ""

    def __repr__(self) -> str:
        return f"{self.title}({self.extra_repr()})"


def check_width(op: Op, expects: int, got: int | None) -> None:
    if got is not None and expects != got:
        raise ShapeError(
            expected(f"{expects} columns", of=f"the input of {op!r}", got=f"{got}", do="give a tensor whose last dimension is that wide")
        )
