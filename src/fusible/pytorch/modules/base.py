"""``BaseModule``: a module that is a list of ops."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import nn

from fusible.errors import ArgumentError, CheckpointError, expected
from fusible.fusions import Fusion
from fusible.nvte import Tensor
from fusible.ops import Op
from fusible.pytorch.compiled import handle_of, holders_of, traced_call
from fusible.pytorch.executors import make_executor
from fusible.pytorch.kv_cache import KVCache
from fusible.pytorch.modules.dictionaries import ScalingStates, held_so, is_empty, versions, written_in_place
from fusible.pytorch.modules.sharded import share_states
from fusible.pytorch.runner import BoundOp, PipelineRunner, key_of
from fusible.tex.constructors import check_constructor

__all__ = ["BaseModule", "ParameterInitMethod", "has_hooks", "hooks_of"]

ParameterInitMethod = Callable[[torch.Tensor], torch.Tensor]
"""Fills a new parameter and returns it: ``init(torch.empty(...))``."""

_STATE = "scaling_state"
_EXTRA = "_extra_state"


class BaseModule(nn.Module):
    """A module that decomposes into ops. A subclass calls ``nn.Module.__init__``, assigns its parameters, then ``super().__init__(*ops)``.

    ``None`` stands for an op that is switched off. Called on its own it runs its ops as a pipeline; inside a ``Sequential`` they join that one's.
    ``forward(x, seq_lens=None)`` takes ``x [tokens, hidden]`` with ``seq_lens`` int32 ``[sequences]``, ``x [tokens, hidden]`` as one sequence, or
    ``x [batch, seq, hidden]``; the output has the input's form. ``cache`` (``KVCache``): the sequences go on from what it holds of them.
    """

    remakes_op: ClassVar[bool] = False
    """Whether it is one op that it makes anew when its options change."""
    takes_batch: ClassVar[bool] = True
    """Whether a call takes ``seq_lens`` and ``cache`` after ``x``; else extra tensors, and may give some."""
    _changes: int = 0
    """How often it has."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_constructor(cls)

    def __init__(self, *ops: Op | None) -> None:
        self._ops = tuple(op for op in ops if op is not None)
        self._bound = tuple(BoundOp(op, self, self._names(op)) for op in self._ops)
        self._executor = "eager"
        self._runners: dict[tuple[Any, ...], PipelineRunner] = {}
        self._loaded_states: dict[str, torch.Tensor] = {}
        self._handed_out: dict[str, int] = {}
        self._unread = self._shared = False
        self._handle = handle_of(self)

    def _names(self, op: Op) -> tuple[str, ...]:
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        missing = [name for name, arg in zip(op.arg_names, op.args, strict=True) if id(arg.data) not in names]
        if missing:
            raise ArgumentError(
                f"Expected every tensor of {op!r} to be a parameter of {type(self).__name__}, got others for {', '.join(missing)}: "
                "assign them as nn.Parameter before calling BaseModule.__init__."
            )
        return tuple(names[id(arg.data)] for arg in op.args)

    @property
    def open(self) -> bool:
        """Whether its ops can be part of an enclosing pipeline: nothing inside has to be called on its own."""
        return True

    def bound_ops(self) -> Iterator[BoundOp]:
        """The module's ops, in order, with the parameters behind them."""
        yield from self._bound

    @property
    def public_extra_inputs(self) -> int:
        """How many extra inputs of the operations in it no channel feeds: they are its caller's."""
        return 0

    def own_ops(self) -> tuple[BoundOp, ...]:
        """The ops that are the module's own, without those of modules inside."""
        return self._bound

    def holders(self) -> Sequence[tuple[nn.Module, Sequence[str]]]:
        """Of each op the module, and its names of the parameters."""
        return holders_of(self.bound_ops())

    def current(self, bound: BoundOp) -> BoundOp:
        """What an op of the module is now."""
        return bound

    def own_passes(self, position: int) -> tuple[tuple[int, int, Fusion], ...]:
        """The passes of its op, at a position in a pipeline, that are code of the caller's, as of ``PlanRequest.fused``."""
        return ()

    def forget_plans(self) -> None:
        """Let go of what was made for the ops as they are: pipelines, and what they hold. Scaling states are kept for those to come."""
        vars(self).update(_loaded_states=self._saved_states(), _runners={})

    def rebound(self, args: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Any]:
        """The attributes of the module whose own ops hold other tensors, by the ids of the ops; every module around it must have forgotten its plans
        (``forget_plans``)."""
        changed = {id(op): op.with_(**args[id(op)]) if id(op) in args else op for op in self._ops}
        bound = tuple(b._replace(op=changed[id(b.op)]) for b in self._bound)
        return {"_ops": tuple(changed[id(op)] for op in self._ops), "_bound": bound}

    def forward(self, x: torch.Tensor, seq_lens: torch.Tensor | None = None, cache: KVCache | None = None) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return traced_call(self, 0, self.holders(), x, seq_lens=seq_lens, cache=cache)[0]
        return self._runner()(x, seq_lens, cache)

    def pipeline(self, part: int) -> PipelineRunner:
        """The ``part``-th of the pipelines that a call of the module, as it now stands, goes through."""
        return self._runner()

    def explain(self, x: torch.Tensor, seq_lens: torch.Tensor | None = None) -> str:
        """What a training call on ``x`` would do: the fused passes and the type on every edge, under the ``autocast`` in force."""
        return self._runner().explain(x, seq_lens)

    def compile(self, executor: str = "xla") -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run this module's passes by ``executor`` from now on: ``"xla"`` as one program per pass and input shape, ``"eager"`` kernel by kernel.

        Returns the module. Raises ``ArgumentError`` for an unknown executor.
        """
        make_executor(executor)
        self._executor = executor
        for runner in self._runners.values():
            runner.executor = make_executor(executor)
        return self

    def _runner(self, bound: tuple[BoundOp, ...] | None = None) -> PipelineRunner:
        bound = tuple(self.bound_ops()) if bound is None else bound
        key = key_of(bound)
        runner = self._runners.get(key)
        if runner is None:
            runner = self._runners[key] = self._new_runner(bound)
            runner.scaling.unread = self._unread
            saved = self._loaded_states.pop(self._state_names().get(key, ""), None) if self._loaded_states else None
            if saved is not None:
                runner.scaling.load(saved)
        return runner

    def _new_runner(self, bound: tuple[BoundOp, ...]) -> PipelineRunner:
        return PipelineRunner(bound, self._executor)

    def _pipelines(self) -> list[tuple[BoundOp, ...]]:
        """The lists of ops that the module, as it now stands, runs as pipelines of its own; in order."""
        return [tuple(self.bound_ops())]

    def _state_names(self) -> dict[tuple[Any, ...], str]:
        """By the key of each pipeline, the name of its scaling state: its place in the module, whatever has been called before."""
        return {key_of(bound): f"{_STATE}.{index}" for index, bound in enumerate(self._pipelines())}

    def _saved_states(self) -> dict[str, torch.Tensor]:
        if not self._runners:
            return dict(self._loaded_states)
        runners = {name: self._runners.get(key) for key, name in self._state_names().items()}
        saved = {name: self._loaded_states.get(name) if runner is None else runner.scaling.save() for name, runner in runners.items()}
        return {name: state for name, state in saved.items() if state is not None}

    def _read_states(self, state_dict: Mapping[str, Any], prefix: str) -> list[tuple[PipelineRunner, Any]]:
        """The scaling states of this module in ``state_dict``, each checked, with its owner; nothing is changed."""
        saved = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(f"{prefix}{_STATE}.")}
        if not saved:
            return []
        runners = {f"{_STATE}.{index}": self._runner(bound) for index, bound in enumerate(self._pipelines())}
        unknown = [name for name in saved if name not in runners]
        if unknown:
            raise CheckpointError(
                expected(
                    f"scaling state for {len(runners)} pipelines",
                    of=type(self).__name__,
                    got=f"also {', '.join(unknown)}",
                    do="load the checkpoint into the model it was saved from",
                )
            )
        return [(runners[name], runners[name].scaling.read(value)) for name, value in saved.items()]

    @property
    def scaling_state(self) -> Mapping[str, torch.Tensor]:
        """The scaling states that ``state_dict`` has of this module, by their numbers. Of a module that has none, nothing.

        ``torch.distributed.checkpoint`` looks every name of a state dict up in the model: ``scaling_state.0`` is found here.
        """
        return ScalingStates({name.removeprefix(f"{_STATE}."): saved for name, saved in self._saved_states().items()})

    def reset_scaling_state(self) -> None:
        """Begin anew: the scaling states of this module and of all inside it are forgotten; the next call under delayed scaling makes others."""
        for module in self.modules():
            if isinstance(module, BaseModule):
                module._loaded_states, module._unread = {}, False
                for runner in module._runners.values():
                    runner.scaling.reset()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        saved = self._saved_states()
        destination.update({f"{prefix}{name}": state for name, state in saved.items()})
        # A loader that writes into what it is given here, as torch.distributed.checkpoint does, reads no scaling state unless there is one.
        if not keep_vars:
            self._handed_out = {} if saved else versions(self)

    def load_state_dict(self, state_dict: Mapping[str, Any], *options: Any, **more: Any) -> Any:
        """As ``nn.Module.load_state_dict``, with everything checked before anything is written: the scaling states of the module and all inside it,
        the shapes, and, where ``strict``, the names. Raises ``CheckpointError``, which is a ``RuntimeError`` as torch's own.

        A module that has scaling states expects them (``missing_keys``); one that has none takes a dictionary with or without. An ``_extra_state`` as
        Transformer Engine writes it is skipped where it is empty; another is a pickle, which is not read (``unexpected_keys``).
        """
        strict = more.get("strict", options[0] if options else True)
        inside = [(f"{name}." if name else "", module) for name, module in self.named_modules() if isinstance(module, BaseModule)]
        if isinstance(state_dict, Mapping):
            state_dict = _copied(state_dict)
            self._share(state_dict, "")
        try:
            for prefix, module in inside if isinstance(state_dict, Mapping) else ():
                module._rename(state_dict, prefix)  # type: ignore[arg-type]  # the copy
            for prefix, module in inside:
                module._read_states(state_dict, prefix)
                if strict:
                    module._check_states(state_dict, prefix)
            _check_fits(self, state_dict, strict=strict)
            return self._load(state_dict, inside, *options, **more)
        finally:
            for _, module in inside:
                module._shared = False  # a load that was refused on the way has not come by all of them

    def _load(self, state_dict: Mapping[str, Any], inside: Sequence[tuple[str, BaseModule]], *options: Any, **more: Any) -> Any:
        """``nn.Module.load_state_dict``, which an interrupt half way does not leave between two models: it is finished first."""
        try:
            return super().load_state_dict(state_dict, *options, **more)
        except RuntimeError:
            raise
        except BaseException:
            for _, module in inside:
                module._shared = True  # the other processes, which were not interrupted, do not share a second time
            with contextlib.suppress(Exception):  # all that was copied is copied again
                super().load_state_dict(state_dict, *options, **more)
            raise

    def _share(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Once for a module and all inside it."""
        if not self._shared:
            share_states(self, state_dict, prefix, _STATE)
            for module in self.modules():
                if isinstance(module, BaseModule):
                    module._shared = True

    def _rename(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Give what ``state_dict`` has for this module under names of another kind of layer its names here."""

    def _check_states(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Refuse a dictionary that leaves this module's scaling states as they are, and one with a state that is not read."""
        missing = [name for name in self._saved_states() if f"{prefix}{name}" not in state_dict]
        if missing:
            of = f"a checkpoint of {type(self).__name__}, which has run under delayed scaling"
            do = "load it with strict=False to keep the scales, and call reset_scaling_state() to begin anew"
            raise CheckpointError(expected("its scaling state", of=of, got=f"one without {prefix + missing[0]!r}", do=do))
        extra = state_dict.get(f"{prefix}{_EXTRA}")
        if not is_empty(extra):
            wanted, got = f"an empty {_EXTRA}, as Transformer Engine's others are pickles, which are not read,", f"another for {prefix + _EXTRA!r}"
            do = "load it with strict=False, and scales begin anew"
            raise CheckpointError(expected(wanted, of=f"a checkpoint of {type(self).__name__}", got=got, do=do))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local: Any, strict: bool, missing: list[str], *rest: Any) -> None:
        self._share(state_dict, prefix)
        self._shared = False
        self._rename(state_dict, prefix)
        states = self._read_states(state_dict, prefix)
        missing += [f"{prefix}{name}" for name in self._saved_states() if f"{prefix}{name}" not in state_dict]
        self._unread = not states and not self._saved_states() and written_in_place(self, state_dict, prefix)
        for runner in self._runners.values():
            runner.scaling.unread = self._unread
        for runner, state in states:
            runner.scaling.take(state)
        for module in self.modules() if states else ():
            if isinstance(module, BaseModule):
                module._handed_out = {}  # a loader that finds this state finds those inside
        for key in [key for key in state_dict if key.startswith(f"{prefix}{_STATE}.")]:
            del state_dict[key]
        if is_empty(state_dict.get(f"{prefix}{_EXTRA}")):
            state_dict.pop(f"{prefix}{_EXTRA}", None)
        super()._load_from_state_dict(state_dict, prefix, local, strict, missing, *rest)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What ``to``, ``to_empty``, ``half`` and the like go through: a parameter that is held quantized stays so, of another nominal dtype."""
        for runner in self._runners.values():
            runner.release_weights()  # torch exchanges a quantized parameter by another, to which nothing else may refer
        return super()._apply(lambda tensor: held_so(tensor, fn(tensor)), recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runners": {}, "_loaded_states": self._saved_states()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handle = handle_of(self)

    def _show_ops(self) -> str:
        return " -> ".join(type(b.op).__name__ for b in self.bound_ops())

    def __repr__(self) -> str:
        text = super().__repr__()
        ops = self._show_ops() if not self._modules else ""
        return f"{text}: {ops}" if ops and ops != type(self).__name__ else text


def _copied(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    copied = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):
        copied._metadata = state_dict._metadata  # type: ignore[attr-defined]
    return copied


def _check_fits(model: BaseModule, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Refuse another model's parameters, of which torch would load those that fit before it says so. What modules rename as they load is theirs."""
    loading = nn.Module._load_from_state_dict, BaseModule._load_from_state_dict
    if any(module._load_state_dict_pre_hooks or type(module)._load_from_state_dict not in loading for module in model.modules()):
        return
    own = model.state_dict(keep_vars=True)
    wrong = ""
    for name in (*own, *state_dict):
        if _STATE in name.split(".") or name.split(".")[-1] == _EXTRA:
            continue
        if name not in own or name not in state_dict:
            wrong = wrong or (f"one {'without' if name in own else 'with'} {name!r}" if strict else "")
        elif isinstance(own[name], torch.Tensor) and isinstance(state_dict[name], torch.Tensor) and own[name].shape != state_dict[name].shape:
            wrong = f"{list(state_dict[name].shape)} for {name!r}, which has {list(own[name].shape)}"
            break
    if wrong:
        do = "load it into the model it was saved from"
        raise CheckpointError(expected("the names and shapes of its parameters", of=f"a checkpoint of {type(model).__name__}", got=wrong, do=do))


def has_hooks(module: nn.Module) -> bool:
    """Whether a user has hooked the module's forward or backward."""
    return any(hooks_of(module))


def hooks_of(module: nn.Module) -> tuple[Mapping[int, Any], ...]:
    """The module's tables of hooks."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
