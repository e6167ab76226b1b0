"""What a family says of its models that are more than a decoder, or none: encoders, and encoders with decoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from fusible.models.parts import Part, Product
from fusible.models.pretrained_model import Example
from fusible.models.relative_positions import RelativeTable
from fusible.models.tokens import Tokens

__all__ = ["AnyBlueprint", "EncoderBlueprint", "EncoderDecoderBlueprint", "Inputs"]


class AnyBlueprint(Protocol):
    """What a family makes of a configuration: ``assembly`` has what makes models of each class of them. ``embedding``: the name of a parameter that
    is of the model's dtype, where the configuration says nothing of that. ``older``: ends of names of parameters, and those that they have in older
    files."""

    @property
    def embedding(self) -> str: ...

    @property
    def older(self) -> tuple[tuple[str, str], ...]: ...


class Inputs(Part, Protocol):
    """The part that makes rows of what a model is given. ``table``: the name of a parameter that is of the model's dtype."""

    @property
    def table(self) -> str: ...

    def example(self, device: torch.device) -> Example:
        """Something small to be given."""
        ...


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


@dataclass(frozen=True)
class EncoderDecoderBlueprint:
    """An encoder, and a decoder of tokens that also looks at what the encoder made.

    ``inputs`` makes rows of what is encoded, by the very module of ``tokens`` where it is the same part; ``tokens`` makes those of the decoder.
    ``memory``: for each attention of the decoder over the encoder's hidden states the product that makes keys and values of these; ``padded``:
    whether these attentions take a mask of what is padding. ``head``: the product that gives logits of the last hidden states times ``head_scale``;
    with ``tied``, by the tokens' table, where the checkpoint has no weight for it. ``encoder_table`` and ``decoder_table``: relative positions, which
    self-attentions take as a mask. ``context``: the most tokens that the decoder was made for, None for any number. ``start``: the token that text
    begins with; ``stop``: those that it ends with; ``unsaid``: those that none has, ``unsaid_first``: those that none has first, after what is given.
    """

    inputs: Inputs
    encoder: tuple[Part, ...]
    tokens: Tokens
    decoder: tuple[Part, ...]
    memory: tuple[Product, ...]
    head: Product
    start: int
    stop: tuple[int, ...] = ()
    unsaid: tuple[int, ...] = ()
    unsaid_first: tuple[int, ...] = ()
    tied: bool = True
    head_scale: float = 1.0
    context: int | None = None
    padded: bool = False
    encoder_table: RelativeTable | None = None
    decoder_table: RelativeTable | None = None
    older: tuple[tuple[str, str], ...] = ()

    @property
    def embedding(self) -> str:
        return self.tokens.table
