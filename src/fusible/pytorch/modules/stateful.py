"""``StatefulModule``: how a module's state dict carries the scaling states of its pipelines, in every way that torch has."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fusible.errors import CheckpointError, expected
from fusible.locks import Lock
from fusible.pytorch.engine.bound import BoundOp, key_of
from fusible.pytorch.engine.carry_over import FormerState, KeptState, carried_over, marks_of
from fusible.pytorch.engine.runner import PipelineRunner
from fusible.pytorch.engine.shares import local_of
from fusible.pytorch.modules.dictionaries import ScalingStates, is_empty, versions, written_in_place
from fusible.pytorch.modules.places import Place, asked_for, without_places
from fusible.quantized.first_scale import begin_anew

__all__ = ["StatefulModule"]

_arranging = Lock()

SCALING_STATES = "scaling_state"
_EXTRA = "_extra_state"


class StatefulModule(nn.Module):
    """A module with pipelines of its own, each of which may have a scaling state.

    ``scaling_state.0``, ``.1`` and so on are the names that the states have in ``state_dict``, beside those of parameters, by the places of the
    pipelines in the module. A state is there from the first call under delayed scaling on, or from the load that brings it; without one, the
    dictionary is that of torch's own layers.
    """

    _runners: dict[tuple[Any, ...], PipelineRunner]
    """The pipelines by their keys. Of one op at one place, the scaling state is the one in here."""
    _set_aside: dict[tuple[Any, ...], PipelineRunner]
    """Pipelines that the module had before its children or their hooks changed, the latest first. They may come back, with the scaling states that
    their ops have by then."""
    _kept_states: tuple[KeptState, ...]
    """Scaling states whose pipelines are yet to be made: of a copy, and of a module whose ops were made anew."""
    _handed_out: dict[str, int]
    """The parameters' version counters when a dictionary without states was made."""
    _unread: bool

    def _runner(self, bound: tuple[BoundOp, ...] | None = None) -> PipelineRunner:
        raise NotImplementedError

    def _new_runner(self, bound: tuple[BoundOp, ...]) -> PipelineRunner:
        raise NotImplementedError

    def _pipelines(self) -> list[tuple[BoundOp, ...]]:
        """The lists of ops that the module, as it now stands, runs as pipelines of its own; in order."""
        raise NotImplementedError

    def arrange(self) -> None:
        """Make the pipelines of the module as it now stands, each with the scaling states that its ops had."""
        with _arranging:
            now = {key_of(bound): bound for bound in self._pipelines()}
            if all(key in self._runners for key in now):
                return
            former = [self._own_states()]
            former += [[FormerState(marks_of(runner.bound), runner.scaling)] for runner in self._set_aside.values()]
            # A module inside that was trained, or loaded, by itself brings its scales along.
            former += [module._own_states() for module in self.modules() if module is not self and isinstance(module, StatefulModule)]
            runners = {key: self._runners.get(key) or self._set_aside.get(key) or self._new_runner(bound) for key, bound in now.items()}
            states = carried_over(former, [marks_of(r.bound) for r in runners.values()], [r.pipeline.state for r in runners.values()])
            for (key, runner), state in zip(runners.items(), states, strict=True):
                if key not in self._runners:
                    runner.scaling.adopt(state, self._unread)
            aside = {key: runner for key, runner in {**self._runners, **self._set_aside}.items() if key not in runners}
            vars(self).update(_runners=runners, _kept_states=(), _set_aside=aside)
            for runner in runners.values():
                runner.aside = None
            for runner in aside.values():
                runner.aside = weakref.ref(self)
                runner.release_weights()

    def _own_states(self) -> list[FormerState]:
        """The scaling states of the pipelines that the module itself has run, or been given by a load."""
        own = [FormerState(marks_of(runner.bound), runner.scaling) for runner in self._runners.values()]
        return own + [state.former() for state in self._kept_states]

    def _migrate_states(self) -> None:
        """Hand the scaling states over to the module's present pipelines, where its ops have changed."""
        if self._kept_states:
            now = {marks_of(bound) for bound in self._pipelines()}
            outdated = any(state.ops not in now for state in self._kept_states)
        else:
            stateful = any(runner.scaling.current is not None for runner in self._runners.values())
            outdated = stateful and any(key_of(bound) not in self._runners for bound in self._pipelines())
        if outdated:
            self.arrange()

    def _kept(self) -> tuple[KeptState, ...]:
        """The scaling states in the form that later pipelines take over."""
        self._migrate_states()
        saved = [(runner.bound, runner.pipeline.state, runner.scaling.save()) for runner in self._runners.values()]
        return self._kept_states + tuple(KeptState(marks_of(bound), layout, state) for bound, layout, state in saved if state is not None)

    def _saved_states(self) -> dict[str, torch.Tensor]:
        self._migrate_states()
        pipelines = {
            f"{SCALING_STATES}.{index}": bound for index, bound in enumerate(self._pipelines() if self._runners or self._kept_states else ())
        }
        kept = {state.ops: state.saved for state in self._kept_states}
        saved: dict[str, torch.Tensor | None] = {}
        for name, bound in pipelines.items():
            runner = self._runners.get(key_of(bound))
            saved[name] = kept.get(marks_of(bound)) if runner is None else runner.scaling.save()
        return {name: state for name, state in saved.items() if state is not None}

    def _read_states(self, state_dict: Mapping[str, Any], prefix: str) -> list[tuple[PipelineRunner, Any]]:
        """The scaling states of this module in ``state_dict``, each checked, with its owner; nothing is changed."""
        saved = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(f"{prefix}{SCALING_STATES}.")}
        if not saved:
            return []
        runners = {f"{SCALING_STATES}.{index}": self._runner(bound) for index, bound in enumerate(self._pipelines())}
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

        ``torch.distributed.checkpoint`` looks every name of a state dict up in the model: ``scaling_state.0`` is found here, and so is one to come.
        """
        return ScalingStates({name.removeprefix(f"{SCALING_STATES}."): saved for name, saved in self._saved_states().items()})

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """As ``nn.Module.named_buffers``; where ``torch.distributed.checkpoint`` asks while it loads, also places for scaling states to come."""
        yield from super().named_buffers(prefix, recurse, remove_duplicate)
        if not recurse:
            for name in asked_for(self, self._possible_names()):
                yield f"{prefix}.{name}" if prefix else name, Place()

    def _possible_names(self) -> Iterator[str]:
        """The names of all scaling states that the module has or may get."""
        yield from (f"{SCALING_STATES}.{index}" for index in range(len(self._pipelines())))

    def go_on_from(self, other: StatefulModule) -> None:
        """Take over the scaling states that the modules inside have in the pipelines of ``other``, of which they are a part."""
        vars(self).update(_kept_states=other._kept(), _runners={}, _set_aside={})

    def reset_scaling_state(self) -> None:
        """Begin anew: the scaling states of this module and of all inside it are forgotten; the next call under delayed scaling makes others."""
        for parameter in self.parameters():
            begin_anew(local_of(parameter))
        for module in self.modules():
            if isinstance(module, StatefulModule):
                module._kept_states, module._unread = (), False
                for runner in (*module._runners.values(), *module._set_aside.values()):
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
        inside = [(f"{name}." if name else "", module) for name, module in self.named_modules() if isinstance(module, StatefulModule)]
        if isinstance(state_dict, Mapping):
            state_dict = _copied(state_dict)
            without_places(state_dict)
        for prefix, module in inside if isinstance(state_dict, Mapping) else ():
            module._rename(state_dict, prefix)  # type: ignore[arg-type]  # the copy
        for prefix, module in inside:
            module._read_states(state_dict, prefix)
            if strict:
                module._check_states(state_dict, prefix)
        _check_fits(self, state_dict, strict=strict)
        return self._load(state_dict, *options, **more)

    def _load(self, state_dict: Mapping[str, Any], *options: Any, **more: Any) -> Any:
        """``nn.Module.load_state_dict``, which an interrupt half way does not leave between two models: it is finished first."""
        try:
            return super().load_state_dict(state_dict, *options, **more)
        except BaseException as error:
            if type(error) is RuntimeError:  # torch's, of names and shapes, when all is copied
                raise
            with contextlib.suppress(Exception):  # all that was copied is copied again
                super().load_state_dict(state_dict, *options, **more)
            raise

    def _entry(self, name: str) -> str:
        """The name under which a dictionary of this kind of layer has the scaling state ``name``, for a sentence."""
        return name

    def _rename(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Rename entries of ``state_dict`` that another kind of layer wrote for this module; a subclass overrides it."""

    def _check_states(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Refuse a dictionary that leaves this module's scaling states as they are, and one with a state that is not read."""
        missing = [self._entry(name) for name in self._saved_states() if f"{prefix}{name}" not in state_dict]
        if missing:
            of = f"a checkpoint of {type(self).__name__}, which has run under delayed scaling"
            do = "load it with strict=False to keep the scales, and call reset_scaling_state() to begin anew"
            raise CheckpointError(expected("its scaling state", of=of, got=f"one without {prefix + missing[0]!r}", do=do))
        extra = state_dict.get(f"{prefix}{_EXTRA}")
        if not is_empty(extra):
            wanted, got = f"an empty {_EXTRA}, as Transformer Engine's others are pickles, which are not read", f"another for {prefix + _EXTRA!r}"
            do = "load it with strict=False, and scales begin anew"
            raise CheckpointError(expected(wanted, of=f"a checkpoint of {type(self).__name__}", got=got, do=do))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local: Any, strict: bool, missing: list[str], *rest: Any) -> None:
        without_places(state_dict)
        self._rename(state_dict, prefix)
        states = self._read_states(state_dict, prefix)
        missing += [f"{prefix}{self._entry(name)}" for name in self._saved_states() if f"{prefix}{name}" not in state_dict]
        self._unread = not states and not self._saved_states() and written_in_place(self, state_dict, prefix)
        for runner in self._runners.values():
            runner.scaling.unread = self._unread
        for runner, state in states:
            runner.scaling.take(state)
        for module in self.modules() if states else ():
            if isinstance(module, StatefulModule):
                module._handed_out = {}  # a loader that finds this state finds those inside
        for key in [key for key in state_dict if key.startswith(f"{prefix}{SCALING_STATES}.")]:
            del state_dict[key]
        if is_empty(state_dict.get(f"{prefix}{_EXTRA}")):
            state_dict.pop(f"{prefix}{_EXTRA}", None)
        for name, parameter in self._parameters.items():
            if f"{prefix}{name}" in state_dict:
                begin_anew(local_of(parameter))  # what was observed was another weight
        super()._load_from_state_dict(state_dict, prefix, local, strict, missing, *rest)


def _copied(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    copied = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):
        copied._metadata = state_dict._metadata  # type: ignore[attr-defined]
    return copied


def _check_fits(model: StatefulModule, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Refuse another model's parameters, of which torch would load those that fit before it says so. What modules rename as they load is theirs."""
    loading = nn.Module._load_from_state_dict, StatefulModule._load_from_state_dict
    if any(module._load_state_dict_pre_hooks or type(module)._load_from_state_dict not in loading for module in model.modules()):
        return
    own = model.state_dict(keep_vars=True)
    wrong = ""
    for name in (*own, *state_dict):
        if SCALING_STATES in name.split(".") or name.split(".")[-1] == _EXTRA:
            continue
        if name not in own or name not in state_dict:
            wrong = wrong or (f"one {'without' if name in own else 'with'} {name!r}" if strict else "")
        elif isinstance(own[name], torch.Tensor) and isinstance(state_dict[name], torch.Tensor) and own[name].shape != state_dict[name].shape:
            wrong = f"{list(state_dict[name].shape)} for {name!r}, which has {list(own[name].shape)}"
            break
    if wrong:
        do = "load it into the model it was saved from"
        raise CheckpointError(expected("the names and shapes of its parameters", of=f"a checkpoint of {type(model).__name__}", got=wrong, do=do))
