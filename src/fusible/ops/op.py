"""``Op``: an operation with its backward, oblivious of framework, executor and neighbours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, Self, TypedDict, Unpack

from fusible import nvte
from fusible.errors import ShapeError, expected
from fusible.quantized import QuantizerRole
from fusible.tex.calls.argument_kinds import Kind
from fusible.tex.calls.constructors import check_constructor

__all__ = ["Context", "Op"]

Context = dict[str, nvte.Tensor]
"""What a forward leaves for its backward: tensors by identifier names."""


_NVTE = SimpleNamespace(Tensor=Kind("an nvte.Tensor", lambda x: isinstance(x, nvte.Tensor)))


class OpTypes(TypedDict, total=False):
    """The types of an op without parameters, as keywords of its constructor."""

    x_dtype: nvte.Type | None
    dy_dtype: nvte.Type | None
    y_dtype: nvte.Type
    dx_dtype: nvte.Type


class Op(ABC):
    """A practically atomic operation.

    It holds parameters (``nvte.Tensor``) and options, never auxiliary tensors. The attributes that end in ``_dtype`` are its types: of the inputs
    ``x``, ``dy`` and each parameter (None: any type will do), and of the outputs ``y``, ``dx`` and each parameter's gradient. A request for an 8-bit
    type is resolved by the plan into one with the recipe's format and scaling; a request for 16 bits takes the activations' own precision.

    ``side_inputs`` and ``side_outputs`` name values that pass beside ``x``: an output goes to the next op that takes an input of the name, and its
    gradient comes back. An op with side outputs returns ``(y, ctx, {name: value})`` from forward and gets their gradients as keywords of
    backward; one with side inputs gets them as keywords of forward and inference, and returns ``(dx, grads, {name: gradient})`` from backward.
    An op that may stand in a pipeline several times is told the names when it is made, and takes the keywords as ``**sides``. None stands for the
    gradient of a side output that nobody took, and of a side input that is ``unwanted``.
    ``given`` names values of the whole call (``sequences``, ``seed``), keywords of all three passes.

    The plan works on copies of an op on which it has set the types, ``unwanted`` (names of tensors whose gradient nobody needs: ``"x"``, a
    parameter's or a side input's), ``training`` (the mode of the op's module), ``position`` (its place in the pipeline), ``x_width`` (the columns
    of x, where they are known before a call) and ``activation`` (the precision of whatever is not quantized).
    """

    side_inputs: tuple[str, ...] = ()
    side_outputs: tuple[str, ...] = ()
    quantizes_y: ClassVar[bool] = False
    """Whether y can be written in an 8-bit type directly; otherwise the consumer casts."""
    quantizes_dx: ClassVar[bool] = False
    """Whether dx can be written in an 8-bit type directly; otherwise the consumer casts."""
    x_dtype: nvte.Type | None = None
    dy_dtype: nvte.Type | None = None
    y_dtype: nvte.Type = nvte.DType.BFloat16
    dx_dtype: nvte.Type = nvte.DType.BFloat16

    overridable: ClassVar[bool] = False
    """Whether backward can compute in high precision after a forward in 8 bits, as ``override`` says."""
    foreign: ClassVar[bool] = False
    """Whether its passes compute elsewhere than by nvte's words, so that they can be neither replayed nor compiled."""

    reshards: str | None = None
    """``"gathers"`` where x has the rows of one process of the op's ``group`` and y those of all, ``"scatters"`` where it is the other way."""
    effects: bool = False
    """Whether a pass of it hands something over beside what it returns: then it cannot be replayed or compiled either."""

    rows_apart: ClassVar[bool] = False
    """Whether its side inputs are tensors of their own, and not rows beside x's: they come as the caller gave them, padding and all."""

    delays_wgrad: bool = False
    """Whether backward may return None for a parameter's gradient that is wanted, and the op's owner gives it later (``delay_wgrad_compute`` in
    NVIDIA's interface). From any other op such a None is refused: the parameter would not be trained. What is handed over is an effect."""

    attends: ClassVar[bool] = False
    """Whether it is attention, whose operands a recipe may want in 8 bits (``fp8_dpa``): the plan then sets ``qkv_dtype`` and ``do_dtype``."""
    qkv_dtype: nvte.Type | None = None
    do_dtype: nvte.Type | None = None

    unwanted: frozenset[str] = frozenset()
    training: bool = True
    position: int = 0
    x_width: int | None = None
    activation: nvte.DType = nvte.DType.BFloat16
    override: str | None = None
    """A recipe's ``backward_override``: ``"high_precision"`` or ``"dequantized"``."""
    roles: Mapping[str, QuantizerRole] = {}
    """What the tensors are that it asks for in 8 bits, for recipes that look at it; by default those of a linear layer."""
    parts: Mapping[str, tuple[str, ...]] = {}
    """Of a parameter that passes take in 8 bits part by part along its first dimension, as a grouped tensor: the names by which its parts ask."""
    routes: tuple[tuple[str, ...], ...] = ()
    """For each of its extra outputs, in NVIDIA's sense, the side outputs that it goes to."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_constructor(cls, {"nvte": _NVTE})

    @property
    def direct_only(self) -> bool:
        """Whether every pass must call the op itself: what it does is not all in its nvte calls, or not all in what it returns."""
        return self.foreign or self.effects or self.delays_wgrad

    @property
    def transparent(self) -> bool:
        """Whether quantized rows of x are, as they are, those of y, and those of dy dx's, but perhaps for their scales: then the op takes the 8-bit
        type that its neighbour asks for, and passes it on."""
        return False

    def passes(self, type: nvte.Type) -> bool:
        """Of a transparent op: whether it passes on what is quantized so."""
        return True

    @property
    def forward_names(self) -> tuple[str, ...]:
        """The names of what forward may take in 8 bits: each has an attribute ``<name>_dtype``, or asks for nothing."""
        return ("x", *self.arg_names)

    @property
    def backward_names(self) -> tuple[str, ...]:
        """The names of what backward may take in 8 bits."""
        return ("dy",)

    def __init__(self, **types: Unpack[OpTypes]) -> None:
        """An op without parameters: ``types`` in the place of those of its class."""
        unknown = types.keys() - OpTypes.__annotations__.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} takes no argument {min(unknown)!r}")
        vars(self).update(types)

    @property
    def given(self) -> tuple[str, ...]:
        return ()

    @property
    def cached(self) -> tuple[int, int, nvte.Type | None] | None:
        """``(groups, width, type)`` of the keys and values that the op keeps of a sequence, where it can go on from them; then its inference finds
        an ``nvte.KVCache`` in the running pass, under the op's position."""
        return None

    @property
    def goes_on(self) -> bool:
        """Whether its inference on the further tokens of sequences is what it is on whole ones."""
        return "sequences" not in self.given or self.cached is not None

    @property
    def reads(self) -> dict[str, tuple[bool, bool]]:
        """Of ``"x"``, ``"dy"`` and parameters that products read in 8 bits: whether along rows, and whether along columns."""
        return {}

    def context(self, *args: Any, **kwargs: Any) -> Context:
        """What backward needs, of the tensors that the parameters of the method name. An op whose backward needs none has no parameters here."""
        return {}

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

    def width(self, width: int | None) -> int | None:
        """The width of y for an x of ``width`` columns; None where it is not known before the call. Raises ``ShapeError`` for a width that the op
        cannot take."""
        return width

    def resolved(self, types: dict[str, Any]) -> dict[str, Any]:
        """The types that a plan has found for what the op takes, by attribute, as the op takes it: for one that communicates before it quantizes."""
        return types

    def wants(self, name: str) -> bool:
        """Whether anyone needs the gradient of ``"x"``, or of the parameter or side input ``name``."""
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

    @property
    def title(self) -> str:
        """The name that an explanation shows."""
        return type(self).__name__

    def extra_repr(self) -> str:
        """What ``repr`` shows beside the name."""
        return ""

    def __repr__(self) -> str:
        return f"{self.title}({self.extra_repr()})"


def check_width(op: Op, expects: int, got: int | None) -> None:
    if got is not None and expects != got:
        raise ShapeError(
            expected(f"{expects} columns", of=f"the input of {op!r}", got=f"{got}", do="give a tensor whose last dimension is that wide")
        )
