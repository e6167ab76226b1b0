"""``Trainer``: steps of AdamW on packed windows, and all that a run needs to go on as if it had not been interrupted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusible.errors import ArgumentError, CheckpointError, check_number, expected
from fusible.models.language_model import LanguageModel
from fusible.models.training.packing import IGNORED, Order, PackedBatch, Windows
from fusible.models.training.schedule import Cosine
from fusible.pytorch import CrossEntropyLoss, FusedAdam

__all__ = ["StepOptions", "Trainer"]

_RNG = "torch_rng_state"
_MASTER, _MOMENTS = "master_param", ("exp_avg", "exp_avg_sq")
_SCALING = "scaling_state"


@dataclass(frozen=True)
class StepOptions:
    """``batch``: windows of a step, of which ``micro_batch`` go through the model at once. ``rate``: of each step. ``weight_decay``: of matrices
    alone (Loshchilov & Hutter 2019, arXiv:1711.05101). ``clip``: the largest norm of all gradients together; 0 for any. ``seed``: of the order of
    windows.

    Raises ``ArgumentError`` for numbers out of range.
    """

    batch: int
    micro_batch: int
    rate: Cosine
    weight_decay: float = 0.1
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "micro_batch"):
            check_number(getattr(self, name), f"{name} of StepOptions", least=1)
        for name in ("weight_decay", "clip"):
            check_number(getattr(self, name), f"{name} of StepOptions", least=0)
        if self.batch % self.micro_batch:
            got, do = self.micro_batch, "choose another"
            raise ArgumentError(expected(f"a divisor of the {self.batch} windows of a step", of="micro_batch of StepOptions", got=got, do=do))


class Trainer:
    """Trains those parameters of ``model`` that require gradients, on ``windows``.

    A step's loss is the mean negative log-likelihood, in nats, of all tokens of its windows that are to be foretold, however many micro-batches
    they go through the model in. Gradients are summed in fp32, and parameters of 16 bits are stepped by fp32 masters. ``done``: the number of steps.
    """

    def __init__(self, model: LanguageModel, windows: Windows, options: StepOptions) -> None:
        self.model, self.options, self.done = model, options, 0
        self._windows, self._order = windows, Order(len(windows), options.seed)
        self._loss = CrossEntropyLoss(ignore_index=IGNORED, reduction="sum")
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not self.parameters:
            raise ArgumentError(expected("parameters that require gradients", of="the model of a Trainer", got="none", do="load it trainable"))
        for parameter in self.parameters.values():
            parameter.grad_dtype = torch.float32  # in 16 bits, the sum over micro-batches would lose the small ones
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.parameters.values() if p.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in self.parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self.optimizer = FusedAdam(groups, lr=options.rate.peak, betas=options.betas, eps=options.eps, master_weights=True)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that go through the model in a step."""
        return self.options.batch * self._windows.length

    def step(self) -> float:
        """Take one step and return its loss. Raises ``ArgumentError`` for one that is not finite, before a parameter is changed."""
        options = self.options
        places = self._order.places(self.done, options.batch)
        batches = [self._windows.batch(part) for part in places.split(options.micro_batch)]
        count = sum(int((batch.targets != IGNORED).sum()) for batch in batches)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for batch in batches:
            loss = self._of(batch) / count
            loss.backward()
            total += loss.item()
        norm = self._clip()
        if not (math.isfinite(total) and math.isfinite(norm)):
            got = total if not math.isfinite(total) else f"gradients of norm {norm}"
            raise ArgumentError(expected("a finite loss and finite gradients", of=f"step {self.done + 1}", got=got, do="lower --lr"))
        for group in self.optimizer.param_groups:
            group["lr"] = options.rate(self.done)
        self.optimizer.step()
        self.done += 1
        return total

    @torch.no_grad()
    def evaluate(self, windows: Windows) -> float:
        """The loss on other windows. Raises ``ArgumentError`` for one that is not finite."""
        self.model.eval()
        places = torch.arange(len(windows)).split(self.options.micro_batch)
        loss = sum(self._of(windows.batch(part)).item() for part in places) / windows.learned
        if not math.isfinite(loss):
            raise ArgumentError(expected("a finite loss", of=f"what is held out after step {self.done}", got=loss, do="lower --lr"))
        return loss

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The parameters that are trained and the scaling states; and the optimizer's moments and masters and the state of torch's generator."""
        scaling = {name: tensor for name, tensor in self.model.state_dict().items() if f"{_SCALING}." in name}
        saved = self.optimizer.state_dict()["state"]
        state = {f"{name}.{kind}": saved[i][kind] for i, name in enumerate(self._names()) if i in saved for kind in self._kinds(name)}
        return {**self.parameters, **scaling}, {**state, _RNG: torch.get_rng_state()}

    def load_state(self, parameters: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], done: int) -> None:
        """Go on from what ``state`` gave after ``done`` steps. Raises ``CheckpointError`` where it does not fit, before anything is changed."""
        scaling = {name: tensor for name, tensor in parameters.items() if f"{_SCALING}." in name}
        _check({name: (tuple(p.shape), p.dtype) for name, p in self.parameters.items()}, {n: t for n, t in parameters.items() if n not in scaling})
        _check(self._expected(done), state)
        own = [{kind: state[f"{name}.{kind}"] for kind in self._kinds(name)} if done else {} for name in self._names()]
        groups = [{**group, "step": done} for group in self.optimizer.state_dict()["param_groups"]]
        try:
            torch.Generator().set_state(state[_RNG])
        except RuntimeError as error:
            raise CheckpointError(expected("a generator's state", of=_RNG, got=f"another ({error})", do="use an intact checkpoint")) from None
        self.model.load_state_dict({**self.model.state_dict(), **scaling})
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(parameters[name])
        torch.set_rng_state(state[_RNG])
        self.optimizer.load_state_dict({"state": {i: each for i, each in enumerate(own) if each}, "param_groups": groups})
        self.done = done

    def _of(self, batch: PackedBatch) -> torch.Tensor:
        """The sum of the losses of a batch's tokens."""
        place = self.model.device
        return self._loss(self.model(batch.tokens.to(place), batch.seq_lens), batch.targets.to(place))

    def _clip(self) -> float:
        """Scale all gradients together to a norm of at most ``clip``, and return what it was (Pascanu et al. 2013, arXiv:1211.5063)."""
        most = self.options.clip or math.inf
        return torch.nn.utils.clip_grad_norm_(self.parameters.values(), most).item()

    def _names(self) -> list[str]:
        """The parameters' names in the optimizer's order."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return [names[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]

    def _kinds(self, name: str) -> tuple[str, ...]:
        return _MOMENTS if self.parameters[name].dtype is torch.float32 else (*_MOMENTS, _MASTER)

    def _expected(self, done: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        names = self.parameters if done else ()
        state = {f"{name}.{kind}": (tuple(self.parameters[name].shape), torch.float32) for name in names for kind in self._kinds(name)}
        return {**state, _RNG: (tuple(torch.get_rng_state().shape), torch.uint8)}


def _check(wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]], saved: Mapping[str, torch.Tensor]) -> None:
    """Every tensor is there, none is left over, and each has the right shape and dtype."""
    missing, extra = sorted(set(wanted) - set(saved)), sorted(set(saved) - set(wanted))
    if missing or extra:
        got = f"none for {missing[0]}" if missing else f"also {extra[0]}"
        raise CheckpointError(expected(f"{len(wanted)} tensors", of="the state of a run", got=got, do="use an intact checkpoint"))
    for name, (shape, dtype) in wanted.items():
        tensor = saved[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            want, got = f"{dtype} {list(shape)}".removeprefix("torch."), f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
            raise CheckpointError(expected(want, of=f"{name} in the state of a run", got=got, do="use an intact checkpoint"))
