"""``PlanBinding``: the attributes that a plan sets on its copy of an op."""

from __future__ import annotations

from typing import Any, Self

from fusible import nvte
from fusible.ops.sharing import RowShare

__all__ = ["PlanBinding"]


_POSITIONS = 1 << 12
"""More than any pipeline has ops. tex's draws take offsets up to 2**24: so many streams are left."""


class PlanBinding:
    """The attributes that a plan sets. The module's own op is never written to: the plan works on copies (``with_``), and on an op that is in no plan
    these are what its class or its constructor says.

    The four ``_dtype`` attributes are the types of the inputs ``x`` and ``dy`` (None: any type will do) and of the outputs ``y`` and ``dx``;
    parameters and their gradients have such attributes too (``OpTypesByName.type_of``). What an op is made with is a request: one for 8 bits is
    resolved by the plan into a type with the recipe's format and scaling, one for 16 bits takes the activations' own precision.
    """

    x_dtype: nvte.Type | None = None
    dy_dtype: nvte.Type | None = None
    y_dtype: nvte.Type = nvte.DType.BFloat16
    dx_dtype: nvte.Type = nvte.DType.BFloat16
    activation: nvte.DType = nvte.DType.BFloat16
    """The precision of whatever is not quantized."""
    override: str | None = None
    """A recipe's ``backward_override``: ``"high_precision"`` or ``"dequantized"``."""
    position: int = 0
    """Its place in the pipeline."""
    row_share: RowShare | None = None
    """Where processes share out rows: which it has of x, and of y."""
    stream: int = 0
    """Which of independent streams it draws its random numbers from: processes that have different parts of a tensor draw from different ones."""
    x_width: int | None = None
    """The columns of x, where they are known before a call."""
    training: bool = True
    """The mode of the op's module."""
    unwanted: frozenset[str] = frozenset()
    """The names of tensors whose gradient nobody needs: ``"x"``, a parameter's or a side input's."""
    routes: tuple[tuple[str, ...], ...] = ()
    """For each of its extra outputs, in NVIDIA's sense, the side outputs that it goes to."""

    def wants(self, name: str) -> bool:
        """Whether anyone needs the gradient of ``"x"``, or of the parameter or side input ``name``."""
        return name not in self.unwanted

    @property
    def draws_at(self) -> int:
        """Where it draws its random numbers, of a call's seed: it has a place for each position in the pipeline and each stream."""
        return self.stream * _POSITIONS + self.position

    def with_(self, **attributes: Any) -> Self:
        """A copy with other attributes; the original is left as it is."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self), **attributes)
        return copy
