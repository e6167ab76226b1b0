"""``Trainer``: steps of AdamW on packed windows, and all that a run needs to go on as if it had not been interrupted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fusible.distributed import shard_tensors
from fusible.distributed.whole import with_states_of_all
from fusible.errors import ArgumentError, CheckpointError, check_number, expected
from fusible.models.language_model import LanguageModel
from fusible.models.training.packing import Order, PackedBatch, Windows
from fusible.models.training.processes import Processes
from fusible.models.training.schedule import Cosine
from fusible.pytorch import FusedAdam

__all__ = ["HELD", "StepOptions", "Trainer"]

_RNG = "torch_rng_state"
_MASTER, _MOMENTS = "master_param", ("exp_avg", "exp_avg_sq")
HELD: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp8": (torch.uint8, torch.float16),
}
"""What first and second moments are held in. In FP8 a second moment would reach no further than 2^-18 of the largest of its tensor, and where it is 0
a step has no bound (Peng et al. 2023, arXiv:2310.18313, hold both so as well)."""
_SCALING = "scaling_state"


@dataclass(frozen=True)
class StepOptions:
    """``batch``: windows of a step, of which ``micro_batch`` go through the model at once. ``rate``: of each step. ``weight_decay``: of matrices
    alone (Loshchilov & Hutter 2019, arXiv:1711.05101). ``clip``: the largest norm of all gradients together; 0 for any. ``seed``: of the order of
    windows. ``moments``: what they are held in, a name in ``HELD``.

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
    moments: str = "fp32"

    def __post_init__(self) -> None:
        if self.moments not in HELD:
            raise ArgumentError(expected(f"one of {', '.join(HELD)}", of="moments of StepOptions", got=repr(self.moments), do="name one of these"))
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
    ``processes``: those that share the work; each has a trainer, made of the same model, all of whose methods are called in every process alike.
    """

    def __init__(self, model: LanguageModel, windows: Windows, options: StepOptions, processes: Processes | None = None) -> None:
        self.model, self.options, self.done, self.processes = model, options, 0, processes or Processes()
        self.processes.check(options.batch)
        self._windows, self._order = windows, Order(len(windows), options.seed)
        self._whole = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters() if p.requires_grad}
        self._loss = self.processes.lay_out(model)
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not self.parameters:
            raise ArgumentError(expected("parameters that require gradients", of="the model of a Trainer", got="none", do="load it trainable"))
        for parameter in self.parameters.values() if self.processes.gradient_dtype is not None else ():
            parameter.grad_dtype = self.processes.gradient_dtype  # in 16 bits, the sum over micro-batches would lose the small ones
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.parameters.values() if p.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in self.parameters.values() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        held = dict(zip(("exp_avg_dtype", "exp_avg_sq_dtype"), HELD[options.moments], strict=True))
        self.optimizer = FusedAdam(groups, lr=options.rate.peak, betas=options.betas, eps=options.eps, master_weights=True, **held)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that go through the model in a step."""
        return self.options.batch * self._windows.length

    def step(self) -> float:
        """Take one step and return its loss. Raises ``ArgumentError`` for one that is not finite, before a parameter is changed."""
        options, processes = self.options, self.processes
        places = self._order.places(self.done, options.batch)
        batches = [self._windows.batch(part) for part in processes.own(places).split(options.micro_batch)]
        count = self._windows.counted(places)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        own = 0.0
        for batch in processes.last_of(self.model, batches):
            loss = self._of(batch) / count
            processes.scaled(loss).backward()
            own += loss.item()
        (total,) = processes.sums(own)
        parameters = list(self.parameters.values())
        processes.add_gradients(parameters)
        norm = processes.clip(parameters, options.clip or math.inf)
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
        rounds = self.processes.rounds(len(windows), self.options.micro_batch)
        (total,) = self.processes.sums(sum(self._of(windows.batch(places, counted)).item() for places, counted in rounds))
        loss = total / windows.learned
        if not math.isfinite(loss):
            raise ArgumentError(expected("a finite loss", of=f"what is held out after step {self.done}", got=loss, do="lower --lr"))
        return loss

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The parameters that are trained and the scaling states; and the optimizer's moments and masters and the state of torch's generator. Where
        processes have parts of the model: this one's."""
        moments = {f"{name}.{kind}": moment for kind, of_kind in self.moments().items() for name, moment in of_kind.items()}
        return {**self.parameters, **self._scaling_states()}, {**moments, _RNG: torch.get_rng_state()}

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """The optimizer's moments and masters, by their kinds and the names of parameters."""
        saved = self.optimizer.state_dict()["state"]
        there = [(name, saved[i]) for i, name in enumerate(self._names()) if i in saved]
        return {kind: {name: state[kind] for name, state in there if kind in state} for kind in (*_MOMENTS, _MASTER)}

    def rest(self) -> dict[str, torch.Tensor]:
        """Of the state what is alike in all processes."""
        return {**self._scaling_states(), _RNG: torch.get_rng_state()}

    def _scaling_states(self) -> dict[str, torch.Tensor]:
        return with_states_of_all(self.model, {name: tensor for name, tensor in self.model.state_dict().items() if f"{_SCALING}." in name})

    @staticmethod
    def parted(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The two parts of ``state``, of all of it together."""
        state = {name: tensor for name, tensor in tensors.items() if name == _RNG or name.rpartition(".")[2] in (*_MOMENTS, _MASTER)}
        return {name: tensor for name, tensor in tensors.items() if name not in state}, state

    def load_state(self, parameters: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], done: int) -> None:
        """Go on from what ``state`` gave after ``done`` steps. Raises ``CheckpointError`` where it does not fit, before anything is changed."""
        scaling = {name: tensor for name, tensor in parameters.items() if f"{_SCALING}." in name}
        _check(self._whole, {n: t for n, t in parameters.items() if n not in scaling})
        _check(self._expected(done), state)
        values = shard_tensors(self.model, {name: parameters[name] for name in self._whole})
        moments = {kind: self._own_of(state, kind) for kind in (*_MOMENTS, _MASTER)} if done else {}
        own = [{kind: of_kind[name] for kind, of_kind in moments.items() if name in of_kind} for name in self._names()]
        groups = [{**group, "step": done} for group in self.optimizer.state_dict()["param_groups"]]
        try:
            torch.Generator().set_state(state[_RNG])
        except RuntimeError as error:
            raise CheckpointError(expected("a generator's state", of=_RNG, got=f"another ({error})", do="use an intact checkpoint")) from None
        self.model.load_state_dict({**self.model.state_dict(), **scaling})
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(values[name])
        torch.set_rng_state(state[_RNG])
        self.optimizer.load_state_dict({"state": {i: each for i, each in enumerate(own) if each}, "param_groups": groups})
        self.done = done

    def _of(self, batch: PackedBatch) -> torch.Tensor:
        """The sum of the losses of a batch's tokens."""
        place = self.model.device
        return self._loss(self.model(batch.tokens.to(place), batch.seq_lens), batch.targets.to(place))

    def _names(self) -> list[str]:
        """The parameters' names in the optimizer's order."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return [names[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]

    def _own_of(self, state: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
        """Of the whole tensors of a kind in ``state`` what this process has, by the names of its parameters."""
        return shard_tensors(self.model, {name: state[f"{name}.{kind}"] for name, (_, dtype) in self._whole.items() if kind in _kinds(dtype)})

    def _expected(self, done: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        whole = self._whole if done else {}
        state = {f"{name}.{kind}": (shape, torch.float32) for name, (shape, dtype) in whole.items() for kind in _kinds(dtype)}
        return {**state, _RNG: (tuple(torch.get_rng_state().shape), torch.uint8)}


def _kinds(dtype: torch.dtype) -> tuple[str, ...]:
    """What the optimizer has of a parameter of that dtype."""
    return _MOMENTS if dtype is torch.float32 else (*_MOMENTS, _MASTER)


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
