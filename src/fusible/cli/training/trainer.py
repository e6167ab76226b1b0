"""``Trainer``: one run of one recipe, with its model, its optimizer and its record. It can be saved and resumed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch

from fusible import tex
from fusible.cli.training.checkpoint import MOMENT_KINDS, RNG_STATE, Checkpoint
from fusible.cli.training.model import ByteGPT, Stage
from fusible.cli.training.observation import join_summaries, summarize_calls
from fusible.cli.training.options import TrainOptions
from fusible.cli.training.ranks import ALONE, Ranks
from fusible.cli.training.record import Record
from fusible.cli.training.shards import Shards
from fusible.cli.training.text import Text
from fusible.distributed import shard_tensors
from fusible.errors import ArgumentError, CheckpointError, expected
from fusible.models.training.schedule import Cosine

__all__ = ["Trainer", "learning_rate"]

_WARMUP, _FLOOR = 20, 0.05
_SPLIT = ("exp_avg", "exp_avg_sq")
"""The moments that lie as their parameters do."""
_SCALING = "body.scaling_state.0"


def learning_rate(step: int, options: TrainOptions) -> float:
    """Linear warm-up over 20 steps times a cosine from ``lr`` at step 0 to a twentieth of it at ``decay_steps``, where it stays.

    It does not depend on ``options.steps``, so a run that is resumed for more steps is the run that had them from the beginning.
    """
    return Cosine(options.lr, _WARMUP, options.decay_steps, _FLOOR)(step)


class Trainer:
    """A run after ``record.step`` steps. Batches depend on seed and step alone, so the step is the position in the data.

    ``ranks``: the processes that share the work. Each has a trainer, all of whose methods are called in every process alike. ``saved``: the
    checkpoint that the run goes on from, of whichever processes.
    """

    def __init__(self, options: TrainOptions, recipe: str, text: Text, ranks: Ranks = ALONE, saved: Checkpoint | None = None) -> None:
        self.options, self.recipe, self.text, self._ranks = options, recipe, text, ranks
        torch.manual_seed(options.seed)
        whole = ByteGPT(options, recipe)
        self.parameters = sum(parameter.numel() for parameter in whole.parameters())
        names = [name for name, _ in whole.named_parameters()]
        if saved is not None:
            _load_model(whole, saved.model, saved.record.step)
            _check("the optimizer's state", _expected_state(whole, saved.record.step), saved.state)
        self.model, self._schedule = ranks.lay_out(whole)
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
            own = summarize_calls(calls, self.model.matrix_products, self._ranks.layout.microbatches)
            self.record.observation = join_summaries([json.loads(each) for each in self._schedule.of_stages(json.dumps(own))])
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
        loss = self._schedule.step(inputs, following, self._mean_loss)
        self._ranks.clip(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss

    def _mean_loss(self, own: float) -> float:
        """The mean of what the processes have. Raises ``ArgumentError`` in all of them where it is not finite in one."""
        losses = self._ranks.each(own)
        for rank, value in enumerate(losses):
            if not math.isfinite(value):
                of = f"step {self.record.step + 1} ({self.recipe})" + (f" on rank {rank}" if len(losses) > 1 else "")
                raise ArgumentError(expected("a finite loss", of=of, got=value, do="lower --lr"))
        return sum(losses) / len(losses)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The mean loss on the held-out windows, in nats per byte, under the recipe. Every process sees all of them, or its parts of each."""
        self.model.eval()
        inputs, following = self._ranks.own_bytes(*self.text.evaluation(self.options.seq_len))
        batches = zip(inputs.split(self.options.batch), following.split(self.options.batch), strict=True)
        (loss,) = self._ranks.mean([sum(self._schedule.loss(x, y) * len(x) for x, y in batches) / len(inputs)])
        return loss

    def explain(self) -> str:
        """The fused passes of a step, as text."""
        (inputs,) = self._ranks.own(self.text.batch(self.options.seed, 0, self.options.batch, self.options.seq_len)[0])
        return self._schedule.explain(inputs)

    def checkpoint(self) -> Checkpoint:
        """Everything that is needed to resume the run, on whichever processes. Of several each has its own shards, and all have the rest."""
        model, moments = self.model.state_dict(), self._moments()
        shards: Shards | None = None
        if self._ranks.world > 1:
            split = {name: model.pop(name) for name, _ in self.model.named_parameters()}
            shards = Shards(self.model, split, {kind: moments.pop(kind) for kind in _SPLIT})
        state = {f"{name}.{kind}": m for kind, of_kind in moments.items() for name, m in self._ranks.whole(self.model, of_kind).items()}
        state[RNG_STATE] = torch.get_rng_state()
        text, whole = self.text.describe(), self._ranks.whole(self.model, model)
        return Checkpoint(self.options, self.recipe, text, self.record, whole, state, shards)

    @classmethod
    def resumed(cls, checkpoint: Checkpoint, options: TrainOptions, text: Text, ranks: Ranks = ALONE) -> Self:
        """The run that ``checkpoint`` saved. Raises ``CheckpointError`` where it does not fit, before it sets the state of torch's generator."""
        _check_text(checkpoint, text)
        return cls(options, checkpoint.recipe, text, ranks, checkpoint)

    def _load_state(self, saved: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
        """Take over the optimizer's moments of the parameters ``names`` of the whole model, and the state of torch's generator."""
        if names:
            moments = {kind: shard_tensors(self.model, {name: saved[f"{name}.{kind}"] for name in names}) for kind in MOMENT_KINDS}
            own = {i: {kind: moments[kind][name] for kind in MOMENT_KINDS} for i, name in enumerate(self._names())}
            self.optimizer.load_state_dict({"state": own, "param_groups": self.optimizer.state_dict()["param_groups"]})
        try:
            torch.set_rng_state(saved[RNG_STATE])
        except RuntimeError as error:
            raise CheckpointError(expected("a generator's state", of=RNG_STATE, got=f"another ({error})", do="use an intact checkpoint")) from None

    def _names(self) -> list[str]:
        """The parameters' names in the optimizer's order."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [names[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]

    def _moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """The optimizer's, by their kinds and the names of their parameters."""
        saved = self.optimizer.state_dict()["state"]
        return {kind: {name: saved[i][kind] for i, name in enumerate(self._names()) if i in saved} for kind in MOMENT_KINDS}


def _load_model(model: ByteGPT, saved: Mapping[str, torch.Tensor], steps: int) -> None:
    """Check and load the parameters. The module that owns the scaling state checks that itself."""
    wanted = model.state_dict()
    if model.recipe.delayed() and steps:
        wanted[_SCALING] = saved.get(_SCALING, torch.empty(0, device="cpu"))
    _check("the model", wanted, saved)
    model.load_state_dict(dict(saved))


def _expected_state(model: ByteGPT, steps: int) -> dict[str, torch.Tensor]:
    """The names, shapes and dtypes of a saved state after ``steps``; before the first there are no moments."""
    parameters = dict(model.named_parameters()) if steps else {}
    state = {
        f"{name}.{kind}": torch.zeros((), dtype=torch.float32, device="cpu") if kind == "step" else p
        for name, p in parameters.items()
        for kind in MOMENT_KINDS
    }
    return {**state, RNG_STATE: torch.get_rng_state()}


def _optimizer(model: Stage, lr: float) -> torch.optim.Optimizer:
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
