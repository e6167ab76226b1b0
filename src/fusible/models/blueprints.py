"""What a family says of its models that are no decoders alone: encoders, and encoders with decoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fusible.models.parts import Part, Product

__all__ = ["AnyBlueprint", "EncoderBlueprint", "Inputs"]


class AnyBlueprint(Protocol):
    """What a family makes of a configuration: ``assembly`` has what makes models of each class of them. ``embedding``: the name of a parameter that
    is of the model's dtype, where the configuration says nothing of that. ``older``: ends of names of parameters, and those that they have in older
    files."""

    @property
    def embedding(self) -> str: ...

    @property
    def older(self) -> tuple[tuple[str, str], ...]: ...


class Inputs(Part, Protocol):
    """The part that makes rows of what a model is given. ``table``: the name of its largest parameter, which is of the model's dtype."""

    @property
    def table(self) -> str: ...


@dataclass(frozen=True)
class EncoderBlueprint:
    """An encoder: ``inputs`` makes rows, and ``body`` hidden states of them, each of which looks at all.

    ``head``: what the model gives is this of the hidden states, or of the first one of each sequence where ``of_first``; with none, it gives the
    hidden states. ``tied``: the product that ends the head is by the inputs' table, where the checkpoint has no weight for it. ``pooler``: of a
    sequence's first hidden state, where the checkpoint has it.
    """

    inputs: Inputs
    body: tuple[Part, ...]
    head: tuple[Part, ...] = ()
    of_first: bool = False
    tied: bool = False
    pooler: tuple[Product, Part] | None = None
    older: tuple[tuple[str, str], ...] = ()

    @property
    def embedding(self) -> str:
        return self.inputs.table
