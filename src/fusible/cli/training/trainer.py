"""``Trainer``: one run of one recipe, with its model, its optimizer and its record. It can be saved and resumed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch

from fusible import tex
from fusible.cli.training.checkpoint import Checkpoint
from fusible.cli.training.model import ByteGPT, cross_entropy
from fusible.cli.training.observation import summarize_calls
from fusible.cli.training.options import TrainOptions
from fusible.cli.training.ranks import ALONE, Ranks
from fusible.cli.training.record import Record
from fusible.cli.training.text import Text
from fusible.distributed import gather_tensors, shard_tensors
from fusible.errors import ArgumentError, CheckpointError, expected
from fusible.pytorch import CrossEntropyLoss

__all__ = ["Trainer", "learning_rate"]

_WARMUP, _FLOOR = 20, 0.05
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_GENERATOR = "torch_rng_state"
_SCALING = "body.scaling_state.0"


def learning_rate(step: int, options: TrainOptions) -> float:
    """Linear warm-up over 20 steps times a cosine from ``lr`` at step 0 to a twentieth of it at ``decay_steps``, where it stays.

    It does not depend on ``options.steps``, so a run that is resumed for more steps is the run that had them from the beginning.
    """
    progress = min(1.0, step / options.decay_steps)
    cosine = _FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))
    return options.lr * cosine * min(1.0, (step + 1) / _WARMUP)


class Trainer:
    """A run after ``record.step`` steps. Batches depend on seed and step alone, so the step is the position in the data.

    ``ranks``: the processes that share the work. Each has a trainer, all of whose methods are called in every process alike. ``saved``: the
    checkpoint that the run goes on from, of whichever processes.
    """

    def __init__(self, options: TrainOptions, recipe: str, text: Text, ranks: Ranks = ALONE, saved: Checkpoint | None = None) -> None:
        self.options, self.recipe, self.text, self._ranks = options, recipe, text, ranks
        torch.manual_seed(options.seed)
        self.model = ByteGPT(options, recipe)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        names = [name for name, _ in self.model.named_parameters()]
        if saved is not None:
            self._load_model(saved.model, saved.record.step)
            _check("the optimizer's state", self._expected_state(saved.record.step), saved.state)
        self._called = ranks.lay_out(self.model)
        self._loss = cross_entropy if ranks.vocabulary_group is None else CrossEntropyLoss(group=ranks.vocabulary_group)
        self.optimizer = _optimizer(self.model, options.lr)
        self.record = Record()
        self._observed = False
        if saved is not None:
            self._load_state(saved.state, names if saved.record.step else [])
            self.record = saved.record

    def step(self) -> float:
        """Take one optimizer step and return its loss. The first step of a process also records its calls.

        Raises ``ArgumentError`` for a loss that is not finite.
        """
        began, steady = time.perf_counter(), self._observed
        with nullcontext() if steady else tex.record() as calls:
            loss = self._step()
        if calls is not None:
            self.record.observation = summarize_calls(calls, self.model.matrix_products)
            self._observed = True
        self.record.add(loss, time.perf_counter() - began, steady=steady)
        return loss

    def _step(self) -> float:
        number = self.record.step
        inputs, following = self._ranks.own(*self.text.batch(self.options.seed, number, self.options.batch, self.options.seq_len))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number, self.options)
        self.model.train()
        self.optimizer.zero_grad()
        loss = self._loss(self._called(inputs), following)
        loss.backward()
        losses = self._ranks.each(loss.item())  # behind backward, in which processes wait for one another anyway
        for rank, value in enumerate(losses):
            if not math.isfinite(value):
                of = f"step {number + 1} ({self.recipe})" + (f" on rank {rank}" if len(losses) > 1 else "")
                raise ArgumentError(expected("a finite loss", of=of, got=value, do="lower --lr"))
        value = sum(losses) / len(losses)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return value

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The mean loss on the held-out windows, in nats per byte, under the recipe. Every process sees all of them, or its parts of each."""
        self.model.eval()
        inputs, following = self._ranks.own_bytes(*self.text.evaluation(self.options.seq_len))
        batches = zip(inputs.split(self.options.batch), following.split(self.options.batch), strict=True)
        (loss,) = self._ranks.mean([sum(self._loss(self.model(x), y).item() * len(x) for x, y in batches) / len(inputs)])
        return loss

    def explain(self) -> str:
        """The fused passes of a step, as text."""
        return self.model.explain(*self._ranks.own(self.text.batch(self.options.seed, 0, self.options.batch, self.options.seq_len)[0]))

    def checkpoint(self) -> Checkpoint:
        """Everything that is needed to resume the run, on whichever processes."""
        model = gather_tensors(self.model, self.model.state_dict())
        return Checkpoint(self.options, self.recipe, self.text.describe(), self.record, model, self._state())

    @classmethod
    def resumed(cls, checkpoint: Checkpoint, options: TrainOptions, text: Text, ranks: Ranks = ALONE) -> Self:
        """The run that ``checkpoint`` saved. Raises ``CheckpointError`` where it does not fit, before it sets the state of torch's generator."""
        _check_text(checkpoint, text)
        return cls(options, checkpoint.recipe, text, ranks, checkpoint)

    def _load_state(self, saved: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
        """Take over the optimizer's moments of the parameters ``names`` of the whole model, and the state of torch's generator."""
        if names:
            moments = {kind: shard_tensors(self.model, {name: saved[f"{name}.{kind}"] for name in names}) for kind in _MOMENTS}
            own = {i: {kind: moments[kind][name] for kind in _MOMENTS} for i, name in enumerate(self._names())}
            self.optimizer.load_state_dict({"state": own, "param_groups": self.optimizer.state_dict()["param_groups"]})
        try:
            torch.set_rng_state(saved[_GENERATOR])
        except RuntimeError as error:
            raise CheckpointError(expected("a generator's state", of=_GENERATOR, got=f"another ({error})", do="use an intact checkpoint")) from None

    def _load_model(self, saved: Mapping[str, torch.Tensor], steps: int) -> None:
        """Check and load the parameters. The module that owns the scaling state checks that itself."""
        wanted = self.model.state_dict()
        if self.model.recipe.delayed() and steps:
            wanted[_SCALING] = saved.get(_SCALING, torch.empty(0))
        _check("the model", wanted, saved)
        self.model.load_state_dict(dict(saved))

    def _names(self) -> list[str]:
        """The parameters' names in the optimizer's order."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [names[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]

    def _state(self) -> dict[str, torch.Tensor]:
        saved = self.optimizer.state_dict()["state"]
        state: dict[str, torch.Tensor] = {}
        for kind in _MOMENTS:
            moments = gather_tensors(self.model, {name: saved[i][kind] for i, name in enumerate(self._names()) if i in saved})
            state |= {f"{name}.{kind}": moment for name, moment in moments.items()}
        return {**state, _GENERATOR: torch.get_rng_state()}

    def _expected_state(self, steps: int) -> dict[str, torch.Tensor]:
        """The names, shapes and dtypes of a saved state after ``steps``; before the first there are no moments."""
        parameters = dict(self.model.named_parameters()) if steps else {}
        state = {f"{name}.{kind}": torch.zeros(()) if kind == "step" else p for name, p in parameters.items() for kind in _MOMENTS}
        return {**state, _GENERATOR: torch.get_rng_state()}


def _optimizer(model: ByteGPT, lr: float) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def _check_text(checkpoint: Checkpoint, text: Text) -> None:
    saved = checkpoint.text
    if saved.get("sha256") != text.sha256:
        had = f"the text of {saved.get('bytes')} bytes that the run was trained on ({saved.get('source')})"
        raise CheckpointError(
            expected(had, of="a resumed run", got=f"another of {text.describe()['bytes']} bytes ({text.source})", do="give the same with --text")
        )


def _check(what: str, wanted: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Every tensor is there, none is left over, and each has the right shape and dtype."""
    missing, extra = sorted(set(wanted) - set(saved)), sorted(set(saved) - set(wanted))
    if missing or extra:
        got = f"none for {missing[0]}" if missing else f"also {extra[0]}"
        raise CheckpointError(expected(f"{len(wanted)} tensors", of=f"{what} in a checkpoint", got=got, do="use an intact checkpoint"))
    for name, tensor in wanted.items():
        if tensor.shape != saved[name].shape or tensor.dtype != saved[name].dtype:
            want, got = (f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (tensor, saved[name]))
            raise CheckpointError(expected(want, of=f"{name} in a checkpoint", got=got, do="use an intact checkpoint"))
