"""``CudaRNGStatesTracker``: random states by names, one of which is in force within a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fusible.errors import ArgumentError, expected

__all__ = ["CudaRNGStatesTracker"]


class CudaRNGStatesTracker:
    """Random states of the device (of a CPU's where there is no CUDA device), each under a name: processes that share a layer out draw its weights
    and its dropout apart, and everything else alike. ``states_``: the states by names; ``seeds_``: what they were made of."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """The states by names, as they are now: what is drawn later leaves them."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Go on from what ``get_states`` gave."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a state by a seed. Raises ``ArgumentError`` for a seed, or a name, that is there already."""
        for what, value, known in (("seed", seed, self.seeds_), ("name", name, self.states_)):
            if value in known:
                of = "CudaRNGStatesTracker.add"
                raise ArgumentError(expected(f"a new {what}", of=of, got=f"{value!r}, which is there already", do="choose another, or call reset()"))
        before = _state()
        (torch.cuda if torch.cuda.is_available() else torch).manual_seed(seed)
        self.states_[name], self.seeds_ = _state(), self.seeds_ | {seed}
        _set(before)

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Within the context random numbers are drawn from the state of ``name``, which goes on by them. Raises ``KeyError`` for a name that was not
        added."""
        if name not in self.states_:
            raise KeyError(expected(f"one of {sorted(self.states_)}", of="name of CudaRNGStatesTracker.fork", got=repr(name), do="add it first"))
        before = _state()
        _set(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = _state()
            _set(before)


def _state() -> torch.Tensor:
    return torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.get_rng_state()


def _set(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)
