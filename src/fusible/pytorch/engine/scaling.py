"""The owner of a pipeline's scaling state: hands out snapshots, takes observations, closes iterations.

An iteration closes when the next training forward begins, not when a pass ends. So a forward that activation checkpointing repeats sees the very
scales of the first time and observes the same amaxes again (the maximum is idempotent), and a pass that fails leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from fusible.compute_pipeline import StateLayout
from fusible.errors import CheckpointError, expected
from fusible.locks import Lock
from fusible.quantized import DelayedScaling, ScalingState
from fusible.tex.protocol import process_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["ScalingOwner", "Snapshot", "join_states", "with_largest_amaxes"]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The scaling state that one call sees. ``version``: of the owner's state that it follows from; ``former``: that state, until this one is
    committed. ``repeated``: it is that of a call that has been committed, and is made again (``engine.repetition``)."""

    forward: ScalingState
    backward: ScalingState
    version: int
    former: Snapshot | None = None
    repeated: bool = False

    @cached_property
    def scales(self) -> dict[str, torch.Tensor]:
        """The scales by slot, fp32 ``[1]`` each."""
        return {slot: state.scale[i : i + 1] for state in (self.forward, self.backward) for i, slot in enumerate(state.slots)}

    @cached_property
    def values(self) -> dict[str, float]:
        """The scales of forward passes by slot, as numbers. Where they are on another device than the CPU, this waits for them."""
        return dict(zip(self.forward.slots, self.forward.scale.tolist(), strict=True))


@dataclass(frozen=True, eq=False)
class _State:
    """The state of an owner. It is one value, which is assigned at once, so that no interrupt or fork finds a part of it."""

    current: Snapshot | None = None
    open: bool = False
    """Whether something was observed in the running iteration, so that the next training forward closes it."""
    awaited: bool = False
    """Whether a training forward awaits its backward."""
    inferred: Snapshot | None = None
    """The snapshot of the latest inference that a backward may repeat."""


class ScalingOwner:
    """Holds the state of one pipeline under delayed scaling. Safe under threads; the state itself is a value."""

    def __init__(self, layout: StateLayout) -> None:
        self.layout = layout
        self._state = _State()
        self._next: tuple[Snapshot | None, DelayedScaling, torch.device, Snapshot] | None = None
        self.unread = False
        """Whether the parameters were loaded in place (by ``torch.distributed.checkpoint``): that skips a saved scaling state where there is no place
        for it."""
        self.recipe: DelayedScaling | None = None
        """The recipe of the latest pass."""
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_next": None, "recipe": None, "_state": replace(self._state, inferred=None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())

    @property
    def current(self) -> Snapshot | None:
        """The committed state, or None before the first call under delayed scaling."""
        return self._state.current

    @property
    def open(self) -> bool:
        """Whether something was observed in the running iteration."""
        return self._state.open

    def snapshot(
        self, recipe: DelayedScaling, device: torch.device, group: ProcessGroup | None = None, *, repeated: bool = False, inference: bool = False
    ) -> Snapshot:
        """The state for a pass that begins now; nothing is committed. ``inference``: the pass records no gradients.

        ``repeated``: the pass repeats a forward from within backward. Either that was a training forward, whose iteration still runs; or, under
        reentrant checkpointing, an inference, whose snapshot it takes.
        """
        with self._lock:
            current = self._fitting(recipe, device)
            self.recipe = recipe
            if repeated:
                former = self._state.inferred
                return former if former is not None and former.version == current.version else current
            snapshot = self._advanced(current, recipe, device, group) if self._state.open else current
            if inference and not self._state.awaited:
                self._state = replace(self._state, inferred=snapshot)
            return snapshot

    def upcoming(self, recipe: DelayedScaling) -> Snapshot | None:
        """The state that the next training forward will see, or None before the first call under delayed scaling. For a look alone, so it talks to no
        other process: where that forward is still to reduce amaxes over processes, this one's own are used."""
        with self._lock:
            current, known = self.current, self._next
            if current is None or not self._state.open:
                return current
            return known[3] if known is not None and known[0] is current and known[1] == recipe else _advance(current, recipe, None)

    def _advanced(self, current: Snapshot, recipe: DelayedScaling, device: torch.device, group: ProcessGroup | None) -> Snapshot:
        """The state of the next iteration. It is computed once, until something else is observed."""
        known = self._next
        if known is None or known[0] is not self.current or known[1:3] != (recipe, device):
            advanced = replace(_advance(current, recipe, group if recipe.reduce_amax else None), former=self.current)
            known = self.current, recipe, device, advanced
            if type(advanced.forward.scale) is torch.Tensor:  # not one without values, of a call under a fake mode
                self._next = known
        return known[3]

    def commit_forward(self, snapshot: Snapshot, amaxes: Mapping[str, torch.Tensor], *, recorded: bool = True) -> None:
        """A training forward on ``snapshot`` has succeeded: its iteration is now the running one, with these amaxes observed. ``recorded``: a
        backward is to follow, as something wants a gradient.

        Where another call has closed the iteration meanwhile, the amaxes are observed in that one's. On the meta device nothing is.
        """
        if snapshot.forward.scale.is_meta:
            return
        with self._lock:
            current = self.current
            if current is None or (snapshot is not current and snapshot.version == current.version):
                current = self._closed(snapshot)
            awaited = recorded or self._state.awaited
            self._state = _State(replace(current, forward=current.forward.observe(amaxes)), open=True, awaited=awaited)

    def _closed(self, snapshot: Snapshot) -> Snapshot:
        """A snapshot as the committed state, with what other threads observed after it was made."""
        states = snapshot.forward, snapshot.backward
        if self.current is not None and snapshot.former is not None:
            then, now = ((s.forward, s.backward) for s in (snapshot.former, self.current))
            states = [state if a is b else state.observe(_running(b)) for state, a, b in zip(states, then, now, strict=True)]
        return Snapshot(*states, version=snapshot.version + 1)

    def commit_backward(self, amaxes: Mapping[str, torch.Tensor]) -> None:
        """A backward has succeeded: its amaxes are observed in the running iteration. A state that was reset after its forward stays so."""
        with self._lock:
            current = self.current
            if current is None:
                return
            self._state = replace(self._state, current=replace(current, backward=current.backward.observe(amaxes)), open=True, awaited=False)

    def _fitting(self, recipe: DelayedScaling, device: torch.device) -> Snapshot:
        """The committed state, or a new one, adapted to the recipe's formats and window and to the device."""
        formats = recipe.fp8_format.forward, recipe.fp8_format.backward
        current = self.current
        if current is None:
            if self.unread:
                of, got = "a model that was loaded in place, as torch.distributed.checkpoint does", "none"
                do = "read it by planner=fusible.pytorch.checkpoint.LoadPlanner(state_dict), or call reset_scaling_state() to begin anew"
                raise CheckpointError(expected("the scaling state", of=of, got=got, do=do))
            slots = self.layout.forward, self.layout.backward
            states = [ScalingState.create(s, dtype, recipe.amax_history_len, device) for s, dtype in zip(slots, formats, strict=True)]
            return Snapshot(*states, version=0)
        states = [
            state.resized(recipe.amax_history_len).to(device).formatted(dtype)
            for state, dtype in zip((current.forward, current.backward), formats, strict=True)
        ]
        same = states[0] is current.forward and states[1] is current.backward
        return current if same else Snapshot(*states, version=current.version, former=current)

    def save(self) -> torch.Tensor | None:
        """The state as a uint8 tensor that holds a safetensors file, or None where there is none."""
        with self._lock:
            if self.current is None:
                return None
            tensors: dict[str, torch.Tensor] = {}
            for name in ("forward", "backward"):
                state: ScalingState = getattr(self.current, name)
                tensors |= {f"{name}.{field}": tensor for field, tensor in state.tensors().items()}
            tensors["open"] = torch.tensor([self._state.open], device="cpu")
            return _encoded(tensors)

    def load(self, saved: torch.Tensor) -> None:
        """Take over what ``save`` gave. Raises ``CheckpointError`` for anything else, and changes nothing then."""
        self.take(self.read(saved))

    def take(self, read: dict[str, Any]) -> None:
        """Take over what ``read`` gave."""
        with self._lock:
            current = self.current
            device = current.forward.scale.device if current is not None else torch.device("cpu")
            version = current.version + 1 if current is not None else 0
            self._state = _State(Snapshot(read["forward"].to(device), read["backward"].to(device), version), open=read["open"])
            self._next, self.unread = None, False

    def adopt(self, read: dict[str, Any] | None, unread: bool) -> None:
        """Go on from a state in the form of ``read``'s, whatever has been before; from none be as new, with ``unread``."""
        with self._lock:
            self._state = _State() if read is None else _State(Snapshot(read["forward"], read["backward"], version=0), open=read["open"])
            self._next, self.unread = None, unread and read is None

    def reset(self) -> None:
        """Be as before the first call under delayed scaling."""
        with self._lock:
            self._state = _State()
            self._next, self.unread = None, False

    def read(self, saved: torch.Tensor) -> dict[str, Any]:
        """Check and decode what ``save`` gave, without taking it over."""
        if not isinstance(saved, torch.Tensor) or saved.dtype != torch.uint8:
            got = f"one of {saved.dtype}" if isinstance(saved, torch.Tensor) else type(saved).__qualname__
            raise CheckpointError(expected("a uint8 tensor", of="a saved scaling state", got=got, do="load the file that was saved"))
        try:
            tensors = load_tensors(saved.cpu().numpy().tobytes())
        except SafetensorError as error:
            raise CheckpointError(
                expected("a safetensors file", of="a saved scaling state", got=f"damaged bytes ({error})", do="use an intact checkpoint")
            ) from None
        wanted = {"open", *(f"{name}.{field}" for name in ("forward", "backward") for field in ("scale", "amax_history", "fp8_dtype"))}
        if set(tensors) != wanted or tensors["open"].dtype != torch.bool:
            got = ", ".join(sorted(set(tensors) ^ wanted)) or f"open of {tensors['open'].dtype}"
            raise CheckpointError(expected("the tensors of save", of="a saved scaling state", got=f"otherwise: {got}", do="use an intact checkpoint"))
        read: dict[str, Any] = {}
        for name, slots in (("forward", self.layout.forward), ("backward", self.layout.backward)):
            fields = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
            read[name] = ScalingState.from_tensors(fields, slots, name)
        read["open"] = bool(tensors["open"].any())
        return read


def join_states(saved: Sequence[torch.Tensor]) -> torch.Tensor:
    """The state of a pipeline, as ``ScalingOwner.save`` gives it, of the states of its parts, one after another: columns are in the order of ops."""
    parts = [load_tensors(state.numpy().tobytes()) for state in saved]
    joined = {f"{name}.fp8_dtype": parts[0][f"{name}.fp8_dtype"] for name in ("forward", "backward")}
    for name, field, dim in (("forward", "scale", 0), ("forward", "amax_history", 1), ("backward", "scale", 0), ("backward", "amax_history", 1)):
        joined[f"{name}.{field}"] = torch.cat([part[f"{name}.{field}"] for part in parts], dim)
    return _encoded({**joined, "open": torch.stack([part["open"] for part in parts]).any(0)})


def with_largest_amaxes(saved: torch.Tensor, group: Any) -> torch.Tensor:
    """A state, as ``ScalingOwner.save`` gives it, with the running iteration's amaxes replaced by their maximum over the processes of ``group``,
    which would be made when it closes."""
    tensors = load_tensors(saved.numpy().tobytes())
    for name in ("forward", "backward"):
        running = tensors[f"{name}.amax_history"][0]
        torch.distributed.all_reduce(running, torch.distributed.ReduceOp.MAX, group=process_group(group))
    return _encoded(tensors)


def _encoded(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.frombuffer(bytearray(save_tensors(dict(tensors))), dtype=torch.uint8)


def _advance(current: Snapshot, recipe: DelayedScaling, group: ProcessGroup | None) -> Snapshot:
    states = [current.forward, current.backward]
    if group is not None:
        states = _reduced(states, group)
    forward, backward = (state.advance(recipe) for state in states)
    return Snapshot(forward, backward, current.version)


def _running(state: ScalingState) -> dict[str, torch.Tensor]:
    """By slot, the amaxes that have been observed in the running iteration."""
    return {slot: state.amax_history[0, i : i + 1] for i, slot in enumerate(state.slots)}


def _reduced(states: Sequence[ScalingState], group: ProcessGroup) -> list[ScalingState]:
    """The states with the running iteration's amaxes replaced by their maximum over the processes of ``group``, by one message."""
    histories = [state.amax_history.clone() for state in states]
    amaxes = torch.cat([history[0] for history in histories])
    torch.distributed.all_reduce(amaxes, torch.distributed.ReduceOp.MAX, group=process_group(group))
    for history, largest in zip(histories, amaxes.split([history.shape[1] for history in histories]), strict=True):
        history[0] = largest
    return [replace(state, amax_history=history) for state, history in zip(states, histories, strict=True)]
