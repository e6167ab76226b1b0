"""The tensors of an op by their names, and the types that it takes them in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fusible import nvte
from fusible.quantized import QuantizerRole

__all__ = ["OpTypesByName", "Reads"]


class Reads(NamedTuple):
    """Along which dimensions products read an operand in 8 bits."""

    rowwise: bool
    columnwise: bool


class OpTypesByName:
    """Each tensor of an op has a name, by which type inference, scaling states (``<position>.<name>``) and explanations know it: ``x``, ``dy``, and
    the attribute name of each parameter. Its type is the attribute ``<name>_dtype``, that of a parameter's gradient ``d<name>_dtype``.
    """

    roles: Mapping[str, QuantizerRole] = {}
    """By name: the roles of the tensors that it asks for in 8 bits, for recipes that look at them; by default those of a linear layer."""
    layer: str = ""
    """The name of its layer in a model, which recipes see in the roles of its tensors; empty where nobody has named it."""
    parts: Mapping[str, tuple[str, ...]] = {}
    """By parameter: the names of its parts along the first dimension, where passes quantize each part by itself, as a grouped tensor."""

    @property
    def args(self) -> list[nvte.Tensor]:
        """The tensors that need gradients, in the order in which backward returns them."""
        return []

    @property
    def arg_names(self) -> tuple[str, ...]:
        """The attribute names of ``args``, in order."""
        names = {id(value): name for name, value in vars(self).items() if isinstance(value, nvte.Tensor)}
        return tuple(names[id(arg)] for arg in self.args)

    @property
    def forward_names(self) -> tuple[str, ...]:
        """The names of what forward may take in 8 bits."""
        return ("x", *self.arg_names)

    @property
    def backward_names(self) -> tuple[str, ...]:
        """The names of what backward may take in 8 bits."""
        return ("dy",)

    @property
    def reads(self) -> dict[str, Reads]:
        """By name, among ``"x"``, ``"dy"`` and parameters: how products read the tensors that they take in 8 bits."""
        return {}

    def type_of(self, name: str) -> nvte.Type | None:
        """The type that it takes the tensor ``name`` in, or asks for it in; None where any will do."""
        return getattr(self, f"{name}_dtype", None)

    def resolved(self, types: dict[str, Any]) -> dict[str, Any]:
        """The types, by attribute, that a plan has found for the op's inputs. An op that communicates before it quantizes changes them here."""
        return types
