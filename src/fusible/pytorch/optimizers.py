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
from fusible.pytorch.optimizer_checks import check_floats, check_held, check_masters, check_steppable, listed, listed_group, no_state
from fusible.pytorch.optimizer_states import Holding, held, held_again, is_scaled, joined, parted, remainder, scale_of, values_of
from fusible.tex.calls.constructors import check_constructor
from fusible.tex.calls.transaction import Write, gathered, run

__all__ = ["FusedAdam", "FusedSGD"]

_CHUNK = 2048 * 32
_L2, _DECOUPLED = 0, 1
_BEFORE_FIRST = frozenset({"master_param"})
"""What the state of a parameter without momentum may have."""


class SteppingInBackward:
    """That an optimizer steps in backward, until ``remove()``."""

    def __init__(self, handles: Iterable[Any]) -> None:
        self._handles = list(handles)

    def remove(self) -> None:
        """End it: ``step()`` steps all parameters again."""
        for handle in self._handles:
            handle.remove()


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
    _gradient = "grad"
    """The attribute of a parameter that has its gradient."""
    _scaled: tuple[str, ...] = ()
    """The names of the scales of slots and masters, where the kernels are given these."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_constructor(cls)

    def __init__(self, params: Any, defaults: dict[str, Any], master_weights: bool, executor: str) -> None:
        self._check_options(defaults)
        self.master_weights = master_weights
        self._executor: Executor = make_executor(executor)
        self._stepped: dict[Any, dict[str, Any]] = {}  # parameters that backward has stepped since step(), and their groups
        self._scales: dict[Any, dict[str, torch.Tensor]] = {}  # beside the state, whose entries are numbers of a parameter each
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

    def step_in_backward(self) -> SteppingInBackward:
        """From now on step each parameter as soon as backward has its gradient, and let go of the gradient: all of them are never there together.

        The numbers are the same. ``step()`` keeps its place after each backward: it counts, and steps whatever has a gradient still. What needs all
        gradients at once does not go with it: clipping by their norm, loss scaling, several backwards for a step, and processes that reduce
        gradients after backward has accumulated them (DDP). The result has ``remove()``, which ends it.

        Raises ``ArgumentError`` for a compiled step, and for gradients that backward does not make (``use_decoupled_grad``); and later, in backward,
        for a second gradient before ``step()`` and for what a step refuses, and leaves that parameter as it was.
        """
        if not self._executor.in_place:
            of, got = f"step_in_backward of {type(self).__name__}", f"a step compiled by {self._executor.name!r}"
            raise ArgumentError(expected("an eager step", of=of, got=got, do="compile('eager')"))
        if self._gradient != "grad":
            of, do = f"step_in_backward of {type(self).__name__}", "leave use_decoupled_grad out, or call step() alone"
            raise ArgumentError(expected("gradients that backward makes", of=of, got=f"those in {self._gradient}", do=do))
        pairs = [(group, p) for group in self.param_groups for p in group["params"]]
        return SteppingInBackward(p.register_post_accumulate_grad_hook(partial(self._step_one, group)) for group, p in pairs)

    @torch.no_grad()
    def _step_one(self, group: dict[str, Any], p: Any) -> None:
        if p in self._stepped:
            of, got = f"step_in_backward of {type(self).__name__}", "another"
            raise ArgumentError(expected("one gradient of a parameter until step()", of=of, got=got, do="call step() after each backward"))
        self._step_batches(self._batches({**group, "params": [p]}))  # the count of the copy of the group goes with it
        p.grad = None
        self._stepped[p] = group

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
                check_steppable(self.param_groups, self.state, self._slots, type(self).__name__, self._gradient, bool(self._scaled))
            raise
        return loss

    def _step(self) -> None:
        batches = [batch for group in self.param_groups for batch in self._batches(group)]
        self._step_batches(batches)
        if self._stepped:
            counted = {id(batch.group) for batch in batches}
            for group in {id(group): group for group in self._stepped.values() if id(group) not in counted}.values() if self._counts else ():
                group["step"] += 1
            self._stepped = {}

    def _step_batches(self, batches: Sequence[Batch]) -> None:
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
                batch.targets = own
                writes += self._run(batch)
                if batch.masters and not batch.scales:
                    writes += [partial(p.copy_, value) for p, value in zip(own, batch.lists[1], strict=True)]
            changed = batch.parameters if all(map(operator.is_, batch.parameters, own)) else [*batch.parameters, *own]
            writes.append(partial(torch._C._increment_version, [p for p in changed if not p.is_inference()]))
        new = [pair for batch in batches for pair in batch.new]
        if new:  # one assignment: to put a tensor into a dict runs Python code, its __hash__
            states, scales = parted(dict(new))
            writes.append(partial(vars(self).__setitem__, "state", defaultdict(dict, [*self.state.items(), *states.items()])))
            if scales:
                writes.append(partial(vars(self).__setitem__, "_scales", {**self._scales, **scales}))
        if self._counts:
            counts = {id(batch.group): batch.group for batch in batches}
            writes += [partial(group.__setitem__, "step", group["step"] + 1) for group in counts.values()]
        return writes

    def _quantized(self, batch: Batch) -> list[Write]:
        """Step copies of the masters and the other state, and quantize from these copies."""
        written = [*batch.lists[1:], *batch.scales]
        copies = [[x.clone() for x in tensors] for tensors in written]
        lists, scales = [batch.lists[0], *copies[: len(batch.lists) - 1]], copies[len(batch.lists) - 1 :]
        values = [torch.empty_like(x, dtype=torch.float32) for x in lists[1]] if scales else lists[1]
        made = replace(batch, lists=lists, scales=scales, targets=values)
        run(gathered(lambda: self._run(made)))
        pairs = zip([x for tensors in written for x in tensors], [x for tensors in copies for x in tensors], strict=True)
        anew = [write for p, value in zip(batch.parameters, values, strict=True) for write in requantized(local(p), value)]
        return [*[partial(old.copy_, new) for old, new in pairs], *anew]

    def _batches(self, group: dict[str, Any]) -> list[Batch]:
        """The batches that a step of a group steps, checked; nothing is changed."""
        self._check_options(group)
        batches: dict[tuple[Any, ...], Batch] = {}
        decoupled = None if self._gradient == "grad" else self._gradient
        for p in group["params"]:
            gradient = p.grad if decoupled is None else getattr(p, decoupled, None)
            if gradient is None:
                continue
            known = self.state.get(p)
            plain = p.__class__ in PLAIN and gradient.__class__ in PLAIN
            if not plain:
                self._check_placed(p, gradient)
            if known is not None and not isinstance(known, dict):
                raise no_state(known, type(self).__name__)
            if known and self._scaled:
                known = {**known, **self._scales.get(p, {})}
            quantized = not plain and needs_own_step(local(p))
            begins = self._separate_first_step and _BEFORE_FIRST.issuperset(known or ())
            state = self._completed(p, known, quantized, begins) if known else self._new_state(p)
            key = p.device, begins, quantized, "master_param" in state
            batch = batches.get(key)
            if batch is None:
                batch = batches[key] = Batch(group, *key[1:], lists=[[] for _ in range(2 + len(self._slots))])
            batch.add(p, gradient, state, state is not known, self._slots)
            if self._scaled:
                batch.add_scales(state, self._scaled, torch.empty(0, dtype=torch.float32, device=p.device))
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
        for dtype in {x.dtype for tensors in (gradients, () if batch.masters else rest[0]) for x in tensors}:
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

    def _check_placed(self, p: Any, gradient: Any) -> None:
        """Raise ``ArgumentError`` where a gradient is not placed as its ``DTensor`` parameter is."""
        placed = [getattr(x, "placements", None) for x in (p, gradient)]
        if placed[0] != placed[1]:
            own, got = (str(each) if each is not None else "a plain tensor" for each in placed)
            raise ArgumentError(expected(own, of=f"a gradient of {type(self).__name__}", got=got, do="redistribute the gradient"))

    def _new_state(self, p: Any) -> dict[str, Any]:
        check_floats(p.dtype, type(self).__name__)
        quantized = needs_own_step(local(p))
        master = self._new_master(p, quantized) if self._wants_master(p, quantized) else {}
        return {**master, **self._new_slots(p)}

    def _completed(self, p: Any, known: dict[str, Any], quantized: bool, begins: bool) -> dict[str, Any]:
        """``known``, itself where nothing lacks, else with a master of the parameter as it is now, where options ask for one, and the buffers that
        begin with this step."""
        if "master_param" not in known and self._wants_master(p, quantized):
            known = {**known, **self._new_master(p, quantized)}
        return {**self._new_slots(p), **known} if begins else known

    def _wants_master(self, p: Any, quantized: bool) -> bool:
        return quantized or (self.master_weights and p.dtype is not torch.float32)

    def _new_master(self, p: Any, quantized: bool) -> dict[str, Any]:
        values = placed_as(p, local(p).dequantize().detach().float().clone()) if quantized else p.detach().float().clone()
        return self._held(p, "master_param", values, again=False)

    def _new_slots(self, p: Any) -> dict[str, Any]:
        own = local(p)
        return {name: placed_as(p, torch.zeros(own.shape, dtype=torch.float32, device=own.device)) for name in self._slots}

    def _held(self, p: Any, name: str, values: Any, again: bool) -> dict[str, Any]:
        """The entries of the state of ``p`` that hold fp32 ``values``, its own to keep, and their scales; ``again``, if they were held before."""
        return {name: values}

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
        return {**super().__getstate__(), **own, "executor": self._executor.name, "_stepped": self._stepped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._executor = make_executor(state.pop("executor", "eager"))
        self._stepped, self._scales = state.pop("_stepped", {}), state.pop("_scales", {})
        super().__setstate__(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``torch.optim.Optimizer`` does, but fp32 state stays fp32 beside parameters of 16 bits. The state dicts of torch's ``Adam``, ``AdamW``
        and ``SGD`` are taken too. What a state lacks is made by the next step: masters, where they are asked for, of the parameters as they are then,
        and momenta. Masters that it brings are stepped, whether this optimizer would make them or not: without them the parameters would go on
        rounded. Raises ``CheckpointError`` for state that does not fit the parameters; the optimizer is then as it was."""
        former = {"state": self.state, "param_groups": self.param_groups, "_scales": self._scales}
        try:
            super().load_state_dict(state_dict)
            groups = zip(self.param_groups, state_dict["param_groups"], strict=True)
            self.param_groups = [self._filled(*group, state_dict["state"]) for group in groups]
            state: dict[Any, dict[str, Any]] = {}
            indices = [index for group in state_dict["param_groups"] for index in group["params"]]
            parameters = [p for group in self.param_groups for p in group["params"]]
            for index, p in zip(indices, parameters, strict=True):
                loaded = state_dict["state"].get(index)
                if loaded:
                    state[p] = self._loaded(index, p, loaded)
            states, self._scales = parted(state)
            self.state = defaultdict(dict, states)
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
            state |= self._held(p, name, self._wide(p, value.to(p.device, torch.float32, copy=True), value.dtype), again=True)
        return state

    def _wide(self, p: Any, value: Any, saved: torch.dtype) -> Any:
        """The fp32 numbers that an entry of a state dict means, which was ``saved`` in a dtype and is cast to fp32."""
        return value


def _number(value: float, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return torch.full((1,), value, dtype=dtype, device=like.device)


class FusedAdam(_FusedOptimizer):
    """Adam (Kingma & Ba 2015), or AdamW (Loshchilov & Hutter 2019) with ``adam_w_mode``, on all parameters of a group in one call.

    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``, ``p -= lr (m / bc1 / (sqrt(v / bc2) + eps) + weight_decay p)`` with ``bc = 1 - b^step``,
    or 1 without ``bias_correction``; without ``adam_w_mode`` ``weight_decay p`` is added to ``g`` instead. Computed in fp32, whatever parameters and
    state are.

    Moments are held in fp32, bf16, fp16 or E4M3 (``torch.uint8``), masters in fp32 or fp16: codes of fp16 and E4M3 with an fp32 scale for each
    tensor (``tex.multi_tensor_adam_scaled`` has the formula). With ``store_param_remainders`` the fp32 master of a bf16 parameter is the parameter
    and 16 further bits. ``use_decoupled_grad`` reads gradients from ``decoupled_grad`` of a parameter, which may have another dtype. State dicts have
    fp32, whatever is held, but remainders, which are int16. Raises ``ArgumentError`` for a rate, decay or betas that are out of range, for a dtype
    that is none of these, and for a compiled step of scaled state.
    """

    _slots = ("exp_avg", "exp_avg_sq")
    _counts = True
    _options = ("master_weights", "adam_w_mode", "holding", "use_decoupled_grad", "_scales")
    holding = Holding()
    """How moments and masters are held."""
    use_decoupled_grad = False

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
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        use_decoupled_grad: bool = False,
    ) -> None:
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0}
        self.adam_w_mode = adam_w_mode
        self.holding = Holding(exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype, store_param_remainders)
        self.use_decoupled_grad = use_decoupled_grad
        self._check_executor(executor)
        super().__init__(params, defaults, master_weights, executor)

    @property
    def _gradient(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "decoupled_grad" if self.use_decoupled_grad else "grad"

    @property
    def _scaled(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return () if self.holding.plain else tuple(map(scale_of, (*self._slots, "master_param")))

    def compile(self, executor: str = "xla") -> None:
        """As of every optimizer. Raises ``ArgumentError`` where state has scales, or is remainders."""
        self._check_executor(executor)
        super().compile(executor)

    def _check_executor(self, executor: str) -> None:
        if executor != "eager" and not self.holding.plain:
            of, do = "executor of FusedAdam with state in fp16 or FP8 or remainders", "hold it in fp32 or bf16"
            raise ArgumentError(expected("'eager'", of=of, got=repr(executor), do=do))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, of the gradients that this optimizer reads."""
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none)
            return
        for p in [p for group in self.param_groups for p in group["params"] if getattr(p, "decoupled_grad", None) is not None]:
            if set_to_none:
                p.decoupled_grad = None
            else:
                p.decoupled_grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with what is held in few bits as the fp32 numbers that it means; remainders as they are."""
        found = super().state_dict()
        if self.holding.wide:
            return found
        named = [index for group in found["param_groups"] for index in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(named, own, strict=True):
            state = found["state"].get(index)
            if state is not None:
                known = (*self._slots, "master_param")
                found["state"][index] = {name: self.get_unscaled_state(p, name) if name in known else value for name, value in state.items()}
        return found

    def get_unscaled_state(self, param: Any, state_name: str) -> Any:
        """``"exp_avg"``, ``"exp_avg_sq"`` or ``"master_param"`` of a parameter as fp32 numbers; a remainder as it is. Raises ``ArgumentError`` where
        there is none."""
        state = self.state.get(param, {})
        value = state.get(state_name) if state_name in (*self._slots, "master_param") else None
        if value is None:
            got = ", ".join(state) or "none"
            of, do = f"state_name of a parameter of {type(self).__name__}", "step the parameter first, and name what it has"
            raise ArgumentError(expected("a state that the parameter has", of=of, got=f"{state_name!r} of {got}", do=do))
        own = local(value)
        return (
            value
            if own.dtype in (torch.float32, torch.int16)
            else placed_as(param, values_of(own, self._scales.get(param, {}).get(scale_of(state_name))))
        )

    def set_scaled_state(self, param: Any, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Hold fp32 numbers, or an int16 remainder, as a parameter's ``"exp_avg"``, ``"exp_avg_sq"`` or ``"master_param"``. Raises ``ArgumentError``
        for another name or shape."""
        known = (*self._slots, "master_param")
        if state_name not in known:
            of, do = f"state_name of {type(self).__name__}", "name one of these"
            raise ArgumentError(expected(", ".join(known), of=of, got=repr(state_name), do=do))
        values = unscaled_state if hasattr(unscaled_state, "to_local") or not hasattr(param, "to_local") else placed_as(param, unscaled_state)
        if local(values).shape != local(param).shape:
            got, do = list(local(values).shape), "pass the state of this parameter"
            raise ArgumentError(expected(str(list(local(param).shape)), of=f"{state_name} of {type(self).__name__}", got=got, do=do))
        wide = self._wide(param, values.to(param.device, torch.float32, copy=True), values.dtype)
        self._keep(param, {**self.state.get(param, {}), **self._scales.get(param, {}), **self._held(param, state_name, wide, again=True)})

    def _keep(self, p: Any, state: dict[str, Any]) -> None:
        """Let entries and their scales be the state of a parameter."""
        states, scales = parted({p: state})
        self.state[p] = states[p]
        self._scales = {**self._scales, **scales}

    def _new_slots(self, p: Any) -> dict[str, Any]:
        own, made = local(p), dict[str, Any]()
        for name in self._slots:
            dtype = getattr(self.holding, name)
            made[name] = placed_as(p, torch.zeros(own.shape, dtype=dtype, device=own.device))
            if is_scaled(dtype):
                made[scale_of(name)] = torch.ones(1, dtype=torch.float32, device=own.device)
        return made

    def _held(self, p: Any, name: str, values: Any, again: bool) -> dict[str, Any]:
        dtype = getattr(self.holding, name)
        if name == "master_param" and self._splits(p):
            of = f"a master_param of {type(self).__name__} with store_param_remainders"
            return {name: placed_as(p, remainder(local(values), local(p), of))}
        if dtype is torch.float32:
            return {name: values}
        codes, scale = (held_again if again else held)(local(values), dtype)
        return {name: placed_as(p, codes), **({} if scale is None else {scale_of(name): scale})}

    def _wide(self, p: Any, value: Any, saved: torch.dtype) -> Any:
        if saved is not torch.int16:
            return value
        if local(p).dtype is not torch.bfloat16 or needs_own_step(local(p)):
            of, do = f"a master_param in a state dict for {type(self).__name__}", "load it beside the parameters it was saved with"
            raise CheckpointError(expected("fp32", of=of, got=f"the remainder of a bf16 parameter, for one of {local(p).dtype}", do=do))
        return placed_as(p, joined(local(p), local(value).to(torch.int16)))

    def _check(self, batch: Batch) -> None:
        super()._check(batch)
        if batch.scales:
            *of_moments, of_masters = batch.scales
            moved, *moments = batch.lists[1:]
            for name, tensors, scales in zip(self._slots, moments, of_moments, strict=True):
                for x, scale in zip(tensors, scales, strict=True):
                    check_held(x, scale, getattr(self.holding, name), name, type(self).__name__)
            for p, x, scale in zip(batch.parameters, moved, of_masters, strict=True) if batch.masters else ():
                dtype = torch.int16 if self._splits(p) else self.holding.master_param
                check_held(x, scale, dtype, "master_param", type(self).__name__)

    def _splits(self, p: Any) -> bool:
        """Whether a parameter's master is a remainder."""
        return self.holding.remainders and local(p).dtype is torch.bfloat16 and not needs_own_step(local(p))

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
        if batch.scales:
            gradients, moved, *moments = lists
            *scales, of_masters = batch.scales
            masters = [moved, of_masters] if batch.masters else []
            of = [gradients, batch.targets if batch.masters else moved, *moments, *scales, *masters]
            tex.multi_tensor_adam_scaled(_CHUNK, noop, of, float(group["lr"]), *options, steps, *rule)
            return []
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
