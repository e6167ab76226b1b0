"""Replaying a pass: the tex calls that a program made once, called again on other tensors of the same shapes and types.

A program is a pure function of its inputs, and all that it computes it computes by tex. So the calls it made, with the flow of tensors between
them, are the program; what ops, nvte and dispatch did around them in Python need not be done again. They are listed in ``engine.listing``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

__all__ = ["Replay", "Step"]


class Step(NamedTuple):
    """``call(*values of sources)``, put into ``target``, of which parts go on to other places: ``(how, place)``. Then ``done`` is let go."""

    call: Callable[..., Any]
    sources: tuple[int, ...]
    target: int
    parts: tuple[tuple[Callable[[Any], Any], int], ...]
    done: tuple[int, ...]


class Replay:
    """A listed program: ``run(inputs)`` gives its output tensors, ``static`` what else it returned."""

    def __init__(self, steps: Sequence[Step], values: list[Any], inputs: int, outputs: tuple[int, ...], static: Any, epoch: int) -> None:
        self._steps = [(s.call, _getter(s.sources), s.target, s.parts, s.done) for s in steps]
        self._values = values
        self._inputs = inputs
        self._outputs = outputs
        self.static = static
        self.epoch = epoch

    def run(self, inputs: list[Any]) -> list[Any]:
        """Call every step in order. The list of inputs is emptied, so that each goes when it has been used."""
        values = self._values.copy()
        values[: self._inputs] = inputs
        inputs.clear()
        for call, get, target, parts, done in self._steps:
            result = values[target] = call(*get(values))
            for part, place in parts:
                values[place] = part(result)
            for place in done:
                values[place] = None
        return [values[place] for place in self._outputs]


def _getter(places: tuple[int, ...]) -> Callable[[list[Any]], tuple[Any, ...]]:
    if len(places) == 1:
        place = places[0]
        return lambda values: (values[place],)
    return itemgetter(*places) if places else lambda _: ()
