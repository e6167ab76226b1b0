"""``Op``: an operation with its backward, oblivious of framework, executor and neighbours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

from fusible import nvte
from fusible.errors import ShapeError, expected

__all__ = ["Context", "Op"]

Context = dict[str, nvte.Tensor]
"""What a forward leaves for its backward: tensors by identifier names."""


class Op(ABC):
    """A practically atomic operation.

    It holds parameters (``nvte.Tensor``) and options, never auxiliary tensors. The attributes that end in ``_dtype`` are its types: of the inputs
    ``x``, ``dy`` and each parameter (None: any type will do), and of the outputs ``y``, ``dx`` and each parameter's gradient. A request for an 8-bit
    type is resolved by the plan into one with the recipe's format and scaling; a request for 16 bits takes the activations' own precision.

    ``side_inputs`` and ``side_outputs`` name values that pass beside ``x``: an output goes to the next op that takes an input of the name, and its
    gradient comes back. An op with side outputs returns ``(y, ctx, {name: value})`` from forward and gets their gradients as keywords of
    backward; one with side inputs gets them as keywords of forward and inference, and returns ``(dx, grads, {name: gradient})`` from backward.
    ``given`` names values of the whole call (``sequences``, ``seed``), keywords of all three passes.

    The plan works on copies of an op on which it has set the types, ``unwanted`` (names of tensors whose gradient nobody needs: ``"x"`` or a
    parameter's), ``training`` (the mode of the op's module) and ``position`` (its place in the pipeline).
    """

    side_inputs: ClassVar[tuple[str, ...]] = ()
    side_outputs: ClassVar[tuple[str, ...]] = ()
    quantizes_y: ClassVar[bool] = False
    """Whether y can be written in an 8-bit type directly; otherwise the consumer casts."""
    quantizes_dx: ClassVar[bool] = False
    """Whether dx can be written in an 8-bit type directly; otherwise the consumer casts."""

    x_dtype: nvte.Type | None = None
    dy_dtype: nvte.Type | None = None
    y_dtype: nvte.Type = nvte.DType.BFloat16
    dx_dtype: nvte.Type = nvte.DType.BFloat16

    unwanted: frozenset[str] = frozenset()
    training: bool = True
    position: int = 0

    @property
    def given(self) -> tuple[str, ...]:
        return ()

    @property
    def cached(self) -> tuple[int, int] | None:
        """``(groups, width)`` of the keys and values that the op keeps of a sequence, where it can go on from them; then its inference finds an
        ``nvte.KVCache`` in the running pass, under the op's position."""
        return None

    @property
    def args(self) -> list[nvte.Tensor]:
        """The tensors that need gradients, in the order in which backward returns them."""
        return []

    @abstractmethod
    def forward(self, x: nvte.Tensor) -> Any:
        """``(y, ctx)``."""

    @abstractmethod
    def backward(self, ctx: Context, dy: nvte.Tensor) -> Any:
        """``(dx, grads)``. Reads tensors from ``ctx`` alone, never from the op's own parameters, which may have changed since."""

    def inference(self, x: nvte.Tensor, **values: Any) -> nvte.Tensor:
        """``y`` alone. The default runs forward."""
        return self.forward(x, **values)[0]

    def width(self, width: int) -> int:
        """The width of y for an x of ``width`` columns. Raises ``ShapeError`` for a width that the op cannot take."""
        return width

    def wants(self, name: str) -> bool:
        """Whether anyone needs the gradient of ``"x"`` or of the parameter ``name``."""
        return name not in self.unwanted

    def with_(self, **attributes: Any) -> Self:
        """A copy with other attributes; the original is left as it is."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **attributes)
        return copy

    @property
    def arg_names(self) -> tuple[str, ...]:
        """The attribute names of ``args``, in order."""
        names = {id(value): name for name, value in vars(self).items() if isinstance(value, nvte.Tensor)}
        return tuple(names[id(arg)] for arg in self.args)

    def extra_repr(self) -> str:
        """What ``repr`` shows beside the name."""
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


def check_width(op: Op, expects: int, got: int) -> None:
    if expects != got:
        raise ShapeError(
            expected(f"{expects} columns", of=f"the input of {op!r}", got=f"{got}", do="give a tensor whose last dimension is that wide")
        )
