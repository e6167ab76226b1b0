"""``EncoderModel``: an encoder in its fastest form, a ``Sequential`` of all its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fusible.errors import ArgumentError, expected
from fusible.models.blueprints import EncoderBlueprint
from fusible.models.parts import stored_in
from fusible.models.pretrained_model import Example, PretrainedModel
from fusible.models.tying import stored_head
from fusible.pytorch import Recipe, Sequential

__all__ = ["EncoderModel"]


class EncoderModel(PretrainedModel):
    """Hidden states of a whole sequence at once, or what a head makes of them: BERT and ViT.

    ``model(tokens, seq_lens=None, token_types=None)``: int64 ``[batch, seq]``, of which each row's tokens beyond ``seq_lens [batch]`` are padding, or
    packed sequences ``[tokens]`` with ``seq_lens [sequences]``; ``token_types``: int64 of the same shape, 0 where not given. ``model(pixels)``:
    ``[batch, channels, height, width]``. Gives what its architecture is for, in the dtype of activations: hidden states ``[batch, seq, hidden]``,
    0 for padding; logits ``[batch, seq, vocabulary]``; or, of the first token of each sequence, logits ``[batch, labels]``. ``encode`` gives the
    hidden states of all of them, and ``pool`` what a pooler makes of these.
    """

    blueprint: EncoderBlueprint

    def __init__(
        self,
        config: Mapping[str, Any],
        blueprint: EncoderBlueprint,
        inputs: nn.Module,
        body: Sequential,
        head: Sequential | None,
        pooler: Sequential | None,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(config, blueprint, recipe)
        self.inputs, self.body, self.head, self.pooler = inputs, body, head, pooler

    def stored_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        plan = self.blueprint
        yield from plan.inputs.stored(self.inputs)
        yield from stored_in(plan.body, self.body)
        if self.head is not None:
            yield from stored_head(plan.head, list(self.head), self._first_parameter)
        if self.pooler is not None and plan.pooler is not None:
            yield from stored_in(plan.pooler, self.pooler)

    def examples(self) -> tuple[Example, ...]:
        return (self.blueprint.inputs.example(self.device),)

    def forward(self, inputs: torch.Tensor, seq_lens: torch.Tensor | None = None, token_types: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.encode(inputs, seq_lens, token_types)
        if self.head is None:
            return hidden
        with self._computing():
            return self.head(first_of(hidden, seq_lens)) if self.blueprint.of_first else self.head(hidden, seq_lens)

    def encode(self, inputs: torch.Tensor, seq_lens: torch.Tensor | None = None, token_types: torch.Tensor | None = None) -> torch.Tensor:
        """The hidden states behind the last block, ``[batch, seq, hidden]`` or packed as the tokens are."""
        x = self.inputs(inputs, seq_lens, token_types)
        with self._computing():
            return self.body(x, seq_lens)

    def pool(self, hidden: torch.Tensor, seq_lens: torch.Tensor | None = None) -> torch.Tensor:
        """``[batch, hidden]``: ``tanh(weight @ h + bias)`` of the first hidden state of each sequence, of those that ``encode`` gave. Raises
        ``ArgumentError`` for a model without a pooler."""
        if self.pooler is None:
            do = "take the first hidden state of a sequence"
            raise ArgumentError(expected("a model with a pooler", of="pool", got="one without", do=do))
        with self._computing():
            return self.pooler(first_of(hidden, seq_lens))


def first_of(hidden: torch.Tensor, seq_lens: torch.Tensor | None) -> torch.Tensor:
    """``[sequences, hidden]``: the first of each sequence. Raises ``ArgumentError`` for a sequence without a token."""
    if hidden.dim() == 3:
        return hidden[:, 0]
    assert seq_lens is not None
    if int(seq_lens.min()) < 1:
        raise ArgumentError(expected("at least one token in each sequence", of="seq_lens", got=0, do="leave empty sequences out"))
    lengths = seq_lens.to(hidden.device)
    return hidden[lengths.cumsum(0) - lengths]
