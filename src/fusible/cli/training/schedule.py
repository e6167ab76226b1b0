"""How a step goes through the model: at once, or in microbatches through stages that stand in several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from fusible.cli.training.model import ByteGPT, Stage
from fusible.distributed import split_stages
from fusible.distributed.exchange import gather_bytes
from fusible.errors import FusibleError

__all__ = ["AtOnce", "InStages", "Loss", "Schedule", "stages_of"]

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``loss(logits, following)``: a mean over windows."""


class Schedule(Protocol):
    """Windows and what follows them are int64 ``[batch, seq]``. Every process gives its part of a loss: the mean of all is the loss of the batch."""

    def step(self, inputs: torch.Tensor, following: torch.Tensor, seen: Callable[[float], float]) -> float:
        """Forward and backward. ``seen(loss)`` is called with this process's part, and its result given back; what it raises ends the step."""
        ...

    def loss(self, inputs: torch.Tensor, following: torch.Tensor) -> float:
        """Forward alone, without gradients."""
        ...

    def explain(self, inputs: torch.Tensor) -> str:
        """The fused passes of a step, as text."""
        ...

    def of_stages(self, text: str) -> list[str]:
        """The ``text`` of every stage, in order."""
        ...


class AtOnce:
    """The whole batch of this process through the whole model. ``called``: the model as it is laid out."""

    def __init__(self, model: Stage, called: Callable[..., Any], loss: Loss) -> None:
        self._model, self._called, self._loss = model, called, loss

    def step(self, inputs: torch.Tensor, following: torch.Tensor, seen: Callable[[float], float]) -> float:
        loss = self._loss(self._called(inputs), following)
        loss.backward()
        return seen(loss.item())  # behind backward, in which processes wait for one another anyway

    def loss(self, inputs: torch.Tensor, following: torch.Tensor) -> float:
        return self._loss(self._called(inputs), following).item()

    def explain(self, inputs: torch.Tensor) -> str:
        return self._model.explain(inputs)

    def of_stages(self, text: str) -> list[str]:
        return [text]


class InStages:
    """The batch in microbatches through the stages, of which this process has the ``place``-th. Where a stage has as many of them in flight as there
    are stages from it to the last, their backwards begin (1F1B: Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    ``called``: the ``stage`` as it is laid out. ``group``: the processes that have the other stages. The last one computes the loss.
    """

    def __init__(self, stage: Stage, called: nn.Module, loss: Loss, place: int, microbatches: int, group: Any) -> None:
        self._stage, self._called, self._loss = stage, called, loss
        self._place, self._microbatches, self._group = place, microbatches, group
        self._count = group.size()
        self._last = place == self._count - 1
        self._training: PipelineScheduleSingle | None = None

    def step(self, inputs: torch.Tensor, following: torch.Tensor, seen: Callable[[float], float]) -> float:
        if self._training is None:
            self._training = self._schedule(Schedule1F1B, inputs, self._microbatches)
        return seen(self._run(self._training.step, inputs, following))

    def loss(self, inputs: torch.Tensor, following: torch.Tensor) -> float:
        return self._run(self._schedule(ScheduleGPipe, inputs, 1).eval, inputs, following)

    def explain(self, inputs: torch.Tensor) -> str:
        microbatch = inputs[: len(inputs) // self._microbatches]
        texts = [f"stage {i} of {self._count}\n\n{text}" for i, text in enumerate(self.of_stages(self._stage.explain(microbatch)), 1)]
        nbytes = self._stage.activations(microbatch, "meta").nbytes
        sent = f"between stages: {nbytes:,} bytes of y, and as many of its gradient, for each of {self._microbatches} microbatches"
        return "\n\n".join([*texts, sent])

    def of_stages(self, text: str) -> list[str]:
        return [each.decode() for each in gather_bytes(text.encode(), self._group)]

    def _schedule(self, kind: type[PipelineScheduleSingle], inputs: torch.Tensor, count: int) -> PipelineScheduleSingle:
        """torch's schedule of this ``kind`` for ``count`` microbatches of ``inputs``. It is told the forms of what is passed on: otherwise it would
        take a step to find them, which scales would remember, and send them as pickles."""
        microbatch = inputs[: len(inputs) // count]
        form = self._stage.activations(microbatch, "meta")
        taken = form if self._place else microbatch
        stage = PipelineStage(self._called, self._place, self._count, inputs.device, input_args=taken, output_args=form, group=self._group)
        return kind(stage, count, loss_fn=lambda y, target: self._loss(y, target) / count, scale_grads=False)

    def _run(self, of: Callable[..., Any], inputs: torch.Tensor, following: torch.Tensor) -> float:
        """This process's part of the loss: other stages than the last have none, and the mean is over the processes of all."""
        losses: list[torch.Tensor] = []
        first_inputs = [inputs] if self._place == 0 else []
        try:
            of(*first_inputs, return_outputs=False, **({"target": following, "losses": losses} if self._last else {}))
        except RuntimeError as error:
            if isinstance(error.__cause__, FusibleError | RuntimeError):
                raise error.__cause__ from None  # torch wraps what a stage raises, of whose words the command knows some
            raise
        return self._count * sum(loss.item() for loss in losses)


def stages_of(model: ByteGPT, count: int) -> list[Stage]:
    """``model`` in ``count`` stages of equal cost. The first has the embedding, the last one the norm and the head."""
    bodies = split_stages(model.body, count)
    embeddings = [model.embedding, *(nn.Identity() for _ in bodies[1:])]
    dtypes = [*(model.activation for _ in bodies[1:]), model.dtype]
    return [
        Stage(embedding, body, model.hidden, model.recipe, model.activation, dtype)
        for embedding, body, dtype in zip(embeddings, bodies, dtypes, strict=True)
    ]
