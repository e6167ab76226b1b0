"""Optimizers whose step is one fused call on all parameters: ``FusedAdam`` and ``FusedSGD``, eagerly by tex or as one compiled program."""

from __future__ import annotations

import importlib
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fusible import tex
from fusible.errors import ArgumentError, CheckpointError, FusibleError, check_number, expected
from fusible.pytorch.engine.executors import make_executor
from fusible.pytorch.engine.program import Executor
from fusible.pytorch.engine.uninterrupted import uninterrupted
from fusible.pytorch.optimizer_batches import PLAIN, STRIDED, SURELY_MEMORY, Batch, local, needs_own_step, placed_as, requantized
from fusible.pytorch.optimizer_checks import check_floats, check_masters, check_steppable, listed, listed_group, no_state
from fusible.tex.calls.constructors import check_constructor
from fusible.tex.calls.transaction import Write, gathered, run

__all__ = ["FusedAdam", "FusedSGD"]

_CHUNK = 2048 * 32
_L2, _DECOUPLED = 0, 1
_BEFORE_FIRST = frozenset({"master_param"})
"""What the state of a parameter without momentum may have."""


class _FusedOptimizer(torch.optim.Optimizer):
    """Parameters, gradients and state as lists of tensors, stepped at once.

    With ``master_weights``, parameters of 16 bits have fp32 copies in the state that the step works on. A quantized parameter has always one, and is
    quantized anew from it. Of a ``DTensor`` (a model under FSDP2) each process steps its own part; its state is ``DTensor``s of the same placements.

    A step happens as a whole or not at all: whatever it refuses it refuses before anything is written, and on a CPU its writes are made with no
    bytecode between them (``tex.transaction``), so that an interrupt comes before all of them or after. Elsewhere signals wait until they are made.
    """

    _slots: tuple[str, ...]
    _counts = False
    """Whether a group counts its steps."""
    _separate_first_step = False
    """Whether parameters whose first gradient this is are stepped by themselves."""
    _options: tuple[str, ...] = ("master_weights",)
    """The attributes that are pickled beside groups and state."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_constructor(cls)

    def __init__(self, params: Any, defaults: dict[str, Any], master_weights: bool, executor: str) -> None:
        self._check_options(defaults)
        self.master_weights = master_weights
        self._executor: Executor = make_executor(executor)
        super().__init__(listed(params, type(self).__name__), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step these parameters too, with options of their own. Raises ``ArgumentError`` for what are none, for one that is stepped already, and for
        options out of range; then nothing is added."""
        taken = [p for group in self.param_groups for p in group["params"]]
        group = listed_group(param_group, type(self).__name__, taken)
        self._check_options({**self.defaults, **group})
        super().add_param_group(group)

    def _check_options(self, options: dict[str, Any]) -> None:
        """Raise ``ArgumentError`` for a number out of range, and for a switch that is none."""
        for name in ("lr", "weight_decay", "eps", "momentum", "dampening"):
            if name in options:
                check_number(options[name], f"{name} of {type(self).__name__}", least=None if name == "dampening" else 0)
        for name in ("bias_correction", "nesterov"):
            if not isinstance(options.get(name, False), int):
                of, got = f"{name} of {type(self).__name__}", repr(options[name])
                raise ArgumentError(expected("a bool", of=of, got=got, do="pass True or False"))

    def compile(self, executor: str = "xla") -> None:
        """Run the steps from now on by ``executor``: with ``"xla"`` each group's step is one executable, whose learning rate and count are inputs."""
        self._executor = make_executor(executor)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient.

        Raises ``ArgumentError`` for a gradient or parameter that cannot be stepped (sparse, no floating-point numbers, without memory, on different
        devices), an option out of range and a state that does not fit, before anything is written.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._step()
        except Exception as error:
            if not isinstance(error, FusibleError) or type(self).__name__ not in str(error):
                check_steppable(self.param_groups, self.state, self._slots, type(self).__name__)
            raise
        return loss

    def _step(self) -> None:
        batches = [batch for group in self.param_groups for batch in self._batches(group)]
        if not batches:
            return
        if any(tensors[0].device.type != "cpu" for batch in batches for tensors in batch.lists[:1]):
            with uninterrupted():  # results are not kept apart until all are there: that would take the memory of the whole state again
                run(self._written(batches))
            return
        run(gathered(lambda: self._written(batches)))

    def _written(self, batches: Sequence[Batch]) -> list[Write]:
        """Step the batches; the writes that are left to do after the kernels."""
        writes: list[Write] = []
        for batch in batches:
            own = [p if p.__class__ in PLAIN else local(p) for p in batch.parameters]
            if batch.quantized:
                writes += self._quantized(batch)
            else:
                writes += self._run(batch)
                if batch.masters:
                    writes += [partial(p.copy_, value) for p, value in zip(own, batch.lists[1], strict=True)]
            changed = batch.parameters if all(map(operator.is_, batch.parameters, own)) else [*batch.parameters, *own]
            writes.append(partial(torch._C._increment_version, [p for p in changed if not p.is_inference()]))
        new = [pair for batch in batches for pair in batch.new]
        if new:  # one assignment: to put a tensor into a dict runs Python code, its __hash__
            writes.append(partial(vars(self).__setitem__, "state", defaultdict(dict, [*self.state.items(), *new])))
        if self._counts:
            counts = {id(batch.group): batch.group for batch in batches}
            writes += [partial(group.__setitem__, "step", group["step"] + 1) for group in counts.values()]
        return writes

    def _quantized(self, batch: Batch) -> list[Write]:
        """Step copies of the masters and the other state, and quantize from these copies."""
        written = batch.lists[1:]
        made = replace(batch, lists=[batch.lists[0], *([x.clone() for x in tensors] for tensors in written)])
        run(gathered(lambda: self._run(made)))
        pairs = zip([x for tensors in written for x in tensors], [x for tensors in made.lists[1:] for x in tensors], strict=True)
        anew = [write for p, value in zip(batch.parameters, made.lists[1], strict=True) for write in requantized(local(p), value)]
        return [*[partial(old.copy_, new) for old, new in pairs], *anew]

    def _batches(self, group: dict[str, Any]) -> list[Batch]:
        """The batches that a step of a group steps, checked; nothing is changed."""
        self._check_options(group)
        batches: dict[tuple[Any, ...], Batch] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            known = self.state.get(p)
            plain = p.__class__ in PLAIN and p.grad.__class__ in PLAIN
            if not plain:
                self._check_placed(p)
            if known is not None and not isinstance(known, dict):
                raise no_state(known, type(self).__name__)
            quantized = not plain and needs_own_step(local(p))
            begins = self._separate_first_step and _BEFORE_FIRST.issuperset(known or ())
            state = self._completed(p, known, quantized, begins) if known else self._new_state(p)
            key = p.device, begins, quantized, "master_param" in state
            batch = batches.get(key)
            if batch is None:
                batch = batches[key] = Batch(group, *key[1:], lists=[[] for _ in range(2 + len(self._slots))])
            batch.add(p, state, state is not known, self._slots)
        for batch in batches.values():
            self._check(batch)
        return list(batches.values())

    def _check(self, batch: Batch) -> None:
        """Raise ``ArgumentError`` where parameters cannot be stepped."""
        name, (gradients, *rest) = type(self).__name__, batch.lists
        if any(x is None for tensors in rest[1:] for x in tensors):
            do = "load a state dict of its own"
            raise ArgumentError(expected(", ".join(self._slots), of=f"the state of parameters of {name}", got="some without", do=do))
        if {x.layout for x in gradients} != STRIDED:
            shape = next(list(x.shape) for x in gradients if x.layout is not torch.strided)
            do = "make the gradient dense"
            raise ArgumentError(expected("dense gradients", of=name, got=f"a sparse one of shape {shape}", do=do))
        for dtype in {x.dtype for tensors in (gradients, rest[0]) for x in tensors}:
            check_floats(dtype, name)
        if batch.masters:
            check_masters(batch.parameters, rest[0], name)
        devices = {x.device for tensors in batch.lists for x in tensors}
        if devices != {batch.parameters[0].device}:
            got, do = ", ".join(sorted(map(str, devices))), "move model and optimizer together"
            raise ArgumentError(expected("one device", of=f"a parameter of {name}, its gradient and its state", got=got, do=do))
        for x in [*gradients, *rest[0]]:
            # A null pointer plus an offset is small. Asking for the storage costs more than all that is checked here.
            if x.data_ptr() < SURELY_MEMORY and x.numel() and (x.is_meta or not x.untyped_storage().size()):
                do = "materialize the model before it is stepped"
                raise ArgumentError(expected("tensors with memory", of=name, got=f"one of {list(x.shape)} without", do=do))

    def _check_placed(self, p: Any) -> None:
        """Raise ``ArgumentError`` where a gradient is not placed as its ``DTensor`` parameter is."""
        placed = [getattr(x, "placements", None) for x in (p, p.grad)]
        if placed[0] != placed[1]:
            own, got = (str(each) if each is not None else "a plain tensor" for each in placed)
            raise ArgumentError(expected(own, of=f"a gradient of {type(self).__name__}", got=got, do="redistribute the gradient"))

    def _new_state(self, p: Any) -> dict[str, Any]:
        check_floats(p.dtype, type(self).__name__)
        quantized = needs_own_step(local(p))
        master = {"master_param": self._new_master(p, quantized)} if self._wants_master(p, quantized) else {}
        return {**master, **self._new_slots(p)}

    def _completed(self, p: Any, known: dict[str, Any], quantized: bool, begins: bool) -> dict[str, Any]:
        """``known``, itself where nothing lacks, else with a master of the parameter as it is now, where options ask for one, and the buffers that
        begin with this step."""
        if "master_param" not in known and self._wants_master(p, quantized):
            known = {**known, "master_param": self._new_master(p, quantized)}
        return {**self._new_slots(p), **known} if begins else known

    def _wants_master(self, p: Any, quantized: bool) -> bool:
        return quantized or (self.master_weights and p.dtype is not torch.float32)

    def _new_master(self, p: Any, quantized: bool) -> Any:
        return placed_as(p, local(p).dequantize().detach().float().clone()) if quantized else p.detach().float().clone()

    def _new_slots(self, p: Any) -> dict[str, Any]:
        own = local(p)
        return {name: placed_as(p, torch.zeros(own.shape, dtype=torch.float32, device=own.device)) for name in self._slots}

    def _run(self, batch: Batch) -> list[Write]:
        """Step a batch's lists by the executor; the writes that its kernels leave to do."""
        raise NotImplementedError

    def _run_compiled(
        self, key: tuple[Any, ...], numbers: list[torch.Tensor], lists: list[list[torch.Tensor]], step: Callable[..., None]
    ) -> list[Write]:
        """``step(numbers, lists)`` as one program that gives the tensors of all lists but the first, the gradients; they are to be copied back."""
        count, length = len(numbers), len(lists[0])

        def program(inputs: list[Any]) -> tuple[list[Any], Any]:
            scalars, flat = inputs[:count], inputs[count:]
            step(scalars, [flat[i : i + length] for i in range(0, len(flat), length)])
            return flat[length:], None

        own = [x for tensors in lists[1:] for x in tensors]
        results, _ = self._executor((type(self).__name__, length, *key), program, [*numbers, *lists[0], *own])
        return [partial(x.copy_, result) for x, result in zip(own, results, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        """All but the executor, whose programs are this process's: the name of it."""
        own = {name: value for name, value in vars(self).items() if name in self._options}
        return {**super().__getstate__(), **own, "executor": self._executor.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._executor = make_executor(state.pop("executor", "eager"))
        super().__setstate__(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer`` does, but fp32 state stays fp32 beside parameters of 16 bits. The state dicts of torch's ``Adam``, ``AdamW``
        and ``SGD`` are taken too. What a state lacks is made by the next step: masters, where they are asked for, of the parameters as they are then,
        and momenta. Masters that it brings are stepped, whether this optimizer would make them or not: without them the parameters would go on
        rounded. Raises ``CheckpointError`` for state that does not fit the parameters; the optimizer is then as it was."""
        former = {"state": self.state, "param_groups": self.param_groups}
        try:
            super().load_state_dict(state_dict)
            groups = zip(self.param_groups, state_dict["param_groups"], strict=True)
            self.param_groups = [self._filled(*group, state_dict["state"]) for group in groups]
            state: defaultdict[Any, Any] = defaultdict(dict)
            indices = [index for group in state_dict["param_groups"] for index in group["params"]]
            parameters = [p for group in self.param_groups for p in group["params"]]
            for index, p in zip(indices, parameters, strict=True):
                loaded = state_dict["state"].get(index)
                if loaded:
                    state[p] = self._loaded(index, p, loaded)
            self.state = state
        except BaseException:  # torch has made new containers, and left the former ones as they were
            vars(self).update(former)
            raise

    def _filled(self, own: dict[str, Any], saved: Mapping[str, Any], states: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
        """A loaded group with the options that it lacks; where torch counts steps by parameter, their count."""
        for option in ("amsgrad", "maximize"):
            if own.get(option):
                do = "go on with torch's optimizer"
                raise CheckpointError(expected(f"no {option}", of=f"a state dict for {type(self).__name__}", got="it", do=do))
        filled = {**self.defaults, **own}
        if self._counts and "step" not in own:
            counts = {int(states[index]["step"]) for index in saved["params"] if "step" in states.get(index, {})}
            if len(counts) > 1:
                got, do = ", ".join(map(str, sorted(counts))), "give parameters of different age groups of their own"
                raise CheckpointError(expected("one count of steps", of=f"a group in a state dict for {type(self).__name__}", got=got, do=do))
            filled["step"] = counts.pop() if counts else 0
        return filled

    def _loaded(self, index: Any, p: Any, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter, of what a state dict has for it."""
        known = (*self._slots, "master_param")
        found = {name: value for name, value in loaded.items() if name in known and isinstance(value, torch.Tensor)}
        needed = found if self._separate_first_step else (*self._slots, *found)
        for name in needed if found else ():
            value = found.get(name)
            if value is None or value.shape != p.shape:
                of, do = f"{name} of parameter {index} in a state dict for {type(self).__name__}", "load it beside the model it was saved with"
                raise CheckpointError(expected(str(list(p.shape)), of=of, got="none" if value is None else list(value.shape), do=do))
        state = {}
        for name, value in found.items():
            if hasattr(p, "to_local") and not hasattr(value, "to_local"):
                # A DTensor has brought the module; importing it costs users of plain tensors a third of a second.
                distribute = importlib.import_module("torch.distributed.tensor").distribute_tensor
                value = distribute(value.to(p.device), p.device_mesh, p.placements)
            state[name] = value.to(p.device, torch.float32, copy=True)
        return state


def _number(value: float, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return torch.full((1,), value, dtype=dtype, device=like.device)


class FusedAdam(_FusedOptimizer):
    """Adam (Kingma & Ba 2015), or AdamW (Loshchilov & Hutter 2019) with ``adam_w_mode``, on all parameters of a group in one call.

    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``, ``p -= lr (m / bc1 / (sqrt(v / bc2) + eps) + weight_decay p)`` with ``bc = 1 - b^step``,
    or 1 without ``bias_correction``; without ``adam_w_mode`` ``weight_decay p`` is added to ``g`` instead. Computed in fp32, whatever the parameters
    are; the moments are fp32. Raises ``ArgumentError`` for a rate, decay or betas that are out of range.
    """

    _slots = ("exp_avg", "exp_avg_sq")
    _counts = True
    _options = ("master_weights", "adam_w_mode")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        *,
        master_weights: bool = False,
        executor: str = "eager",
    ) -> None:
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0}
        self.adam_w_mode = adam_w_mode
        super().__init__(params, defaults, master_weights, executor)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        steps = options["step"]
        if not isinstance(steps, int) or steps < 0:
            do = "leave the count to the optimizer"
            raise ArgumentError(expected("an integer of at least 0", of="step of FusedAdam", got=repr(steps), do=do))
        betas = options["betas"]
        if not (isinstance(betas, list | tuple) and len(betas) == 2 and all(isinstance(b, int | float) and 0 <= b < 1 for b in betas)):
            do = "pass for instance (0.9, 0.999)"
            raise ArgumentError(expected("two numbers from 0 to below 1", of="betas of FusedAdam", got=options["betas"], do=do))

    def _run(self, batch: Batch) -> list[Write]:
        group, lists, steps = batch.group, batch.lists, batch.group["step"] + 1
        beta1, beta2 = group["betas"]
        options = (beta1, beta2, group["eps"])
        rule = (_DECOUPLED if self.adam_w_mode else _L2, int(group["bias_correction"]), group["weight_decay"])
        like = lists[1][0]
        noop = _number(0, torch.int32, like)
        if self._executor.in_place:
            tex.multi_tensor_adam(_CHUNK, noop, lists, float(group["lr"]), *options, steps, *rule)
            return []

        def step(numbers: list[Any], of: list[list[Any]]) -> None:
            flag, lr, count, one = numbers
            tex.multi_tensor_adam_capturable(_CHUNK, flag, of, lr, *options, count, *rule, one)

        lr, count, one = (group["lr"], torch.float32), (steps, torch.int32), (1.0, torch.float32)
        numbers = [noop, *(_number(value, dtype, like) for value, dtype in (lr, count, one))]
        return self._run_compiled((options, rule), numbers, lists, step)


class FusedSGD(_FusedOptimizer):
    """Stochastic gradient descent with momentum (Polyak 1964; Nesterov: Sutskever et al. 2013), on all parameters of a group in one call.

    ``d = g + weight_decay p``; ``buf = momentum buf + (1 - dampening) d``, at first ``d``; ``p -= lr buf``, or ``lr (d + momentum buf)`` with
    ``nesterov``. Computed in fp32, with fp32 buffers. Raises ``ArgumentError`` for options out of range.
    """

    _slots = ("momentum_buffer",)
    _separate_first_step = True  # they begin their buffers with it

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        master_weights: bool = False,
        executor: str = "eager",
    ) -> None:
        if nesterov and (momentum <= 0 or dampening):
            got = f"momentum={momentum}, dampening={dampening}"
            raise ArgumentError(expected("a momentum and no dampening", of="FusedSGD with nesterov", got=got, do="pass momentum=0.9"))
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults, master_weights, executor)

    def _run(self, batch: Batch) -> list[Write]:
        group, lists = batch.group, batch.lists
        like = lists[1][0]
        noop = _number(0, torch.int32, like)
        before = (group["weight_decay"], group["momentum"], group["dampening"])
        after = (group["nesterov"], batch.begins, False, 1.0)
        if self._executor.in_place:
            tex.multi_tensor_sgd(_CHUNK, noop, lists, *before, float(group["lr"]), *after)
            return []

        def step(numbers: list[Any], of: list[list[Any]]) -> None:
            flag, lr = numbers
            tex.multi_tensor_sgd(_CHUNK, flag, of, *before, lr.reshape(()), *after)

        return self._run_compiled((before, after), [noop, _number(float(group["lr"]), torch.float32, like)], lists, step)
