"""Replaying a pass: the tex calls that a program made once, called again on other tensors of the same shapes and types.

A program is a pure function of its inputs, and all that it computes it computes by tex. So the calls it made, with the flow of tensors between
them, are the program; what ops, nvte and dispatch did around them in Python need not be done again. They are listed in ``engine.listing``.

A replay is a Python function written for its list, a line a call, so that between two calls there is no more than Python takes from one line to the
next: 0.1 us, where a loop over the list takes 1.2. Where the inputs lie as they did when they were listed, kernels are called by what their backends
made of these calls beforehand (``fusible.tex.interface.specialize``).
"""

from __future__ import annotations

import functools
import itertools
import linecache
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusible.tex.backends.cpu import layouts
from fusible.tex.calls.call_text import compiled

__all__ = ["Replay", "Step", "last_uses", "layout_of"]

Run = Callable[[list[Any]], list[Any]]

_modes = torch._C._len_torch_dispatch_stack
_numbers = itertools.count()


class Step(NamedTuple):
    """``call(*values of sources)`` is put into ``target``, of which parts go on to other places: ``(what to write after it, place)``.

    ``specialized``: what may be called instead, with its sources. ``assembles``: the call only puts its arguments together, for others to take.
    """

    call: Callable[..., Any]
    sources: tuple[int, ...]
    target: int
    parts: tuple[tuple[str, int], ...] = ()
    specialized: tuple[Callable[..., Any], tuple[int, ...]] | None = None
    assembles: bool = False

    def as_specialized(self) -> Step:
        return self if self.specialized is None else self._replace(call=self.specialized[0], sources=self.specialized[1])


class Replay:
    """A listed program: ``run(inputs)`` gives its output tensors, ``static`` what else it returned.

    Values have places: the first ``inputs`` are the inputs', then come those of ``constants`` and of the steps' results. ``layout``: the inputs' by
    ``layout_of``, when they were listed.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        constants: Mapping[int, Any],
        inputs: int,
        outputs: Sequence[int],
        static: Any,
        epoch: int,
        layout: bytes | None,
    ) -> None:
        self.steps, self.outputs = steps, outputs
        self.static, self.epoch = static, epoch
        self._constants, self._inputs = constants, inputs
        self._layout = layout if any(step.specialized is not None for step in steps) else None
        """None where nothing hangs on it."""

    def run(self, inputs: list[Any]) -> list[Any]:
        """Call every step in order. The list of inputs is emptied, so that each goes when it has been used."""
        if self._layout is not None and layout_of(inputs) == self._layout:
            return self._run_specialized(inputs)
        return self._run_listed(inputs)

    @functools.cached_property
    def _run_listed(self) -> Run:
        return self._written(self.steps)

    @functools.cached_property
    def _run_specialized(self) -> Run:
        return self._written(_taken([step.as_specialized() for step in self.steps], self.outputs))

    def _written(self, steps: Sequence[Step]) -> Run:
        """The function that makes the calls of ``steps``."""

        def name(place: int) -> str:
            return f"k{place}" if place in self._constants else f"v{place}"

        read = {*self.outputs, *(source for step in steps for source in step.sources)}
        lines = ["def run(inputs):"]
        if self._inputs:
            lines += [f"    {''.join(f'v{place}, ' for place in range(self._inputs))}= inputs", "    inputs.clear()"]
            lines += [f"    del v{place}" for place in range(self._inputs) if place not in read]
        for number, (step, ends) in enumerate(zip(steps, last_uses(steps, {*self.outputs, *self._constants}), strict=True)):
            lines.append(f"    v{step.target} = c{number}({', '.join(map(name, step.sources))})")
            lines += [f"    v{place} = v{step.target}{part}" for part, place in step.parts]
            if ends:
                lines.append(f"    del {', '.join(map(name, ends))}")
        lines.append(f"    return [{', '.join(map(name, self.outputs))}]")
        names = {f"k{place}": value for place, value in self._constants.items()} | {f"c{number}": step.call for number, step in enumerate(steps)}
        file = f"{__file__}: pass {next(_numbers)}"
        weakref.finalize(self, linecache.cache.pop, file, None)  # where tracebacks find the lines
        return compiled("\n".join(lines) + "\n", file, "run", names)


def last_uses(steps: Sequence[Step], kept: Container[int]) -> list[list[int]]:
    """For each step the places, of those not ``kept``, that nobody reads after it."""
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for place in (*step.sources, step.target, *(place for _, place in step.parts)):
            last[place] = number
    ending: list[list[int]] = [[] for _ in steps]
    for place, number in last.items():
        if place not in kept:
            ending[number].append(place)
    return ending


def _taken(steps: Sequence[Step], outputs: Iterable[int]) -> list[Step]:
    """``steps`` without those that put together what nobody takes."""
    wanted = {*outputs}
    taken: list[Step] = []
    for step in reversed(steps):
        if not step.assembles or step.target in wanted:
            taken.append(step)
            wanted.update(step.sources)
    return taken[::-1]


def layout_of(inputs: list[Any]) -> bytes | None:
    """How the inputs of a program lie, on which hangs how all else in it lies: their dtypes, shapes and strides. None unless they are torch's own
    tensors in host memory, and nothing stands between a call and torch's kernels."""
    return layouts(inputs) if not _modes() else None
