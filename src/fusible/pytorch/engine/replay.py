"""Replaying a pass: the tex calls that a program made once, called again on other tensors of the same shapes and types.

A program is a pure function of its inputs, and all that it computes it computes by tex. So the calls it made, with the flow of tensors between
them, are the program; what ops, nvte and dispatch did around them in Python need not be done again. They are listed in ``engine.listing``.

A replay is a Python function written for its list, a line a call, so that between two calls there is no more than Python takes from one line to the
next: 0.1 us, where a loop over the list takes 1.2. Where the inputs lie as they did when they were listed, kernels are called by what their backends
made of these calls beforehand (``fusible.tex.interface.specialize``), and those that are native kernels and no more run as one native program
(``engine.native_programs``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusible.pytorch.engine.native_programs import with_native_programs
from fusible.pytorch.engine.steps import Run, Step, taken, written
from fusible.tex.backends.cpu import layouts

__all__ = ["Replay", "layout_of"]

_modes = torch._C._len_torch_dispatch_stack


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
        return written(self.steps, self._constants, range(self._inputs), self.outputs)

    @functools.cached_property
    def _run_specialized(self) -> Run:
        specialized = taken([step.as_specialized() for step in self.steps], self.outputs)
        return written(with_native_programs(specialized, self.outputs), self._constants, range(self._inputs), self.outputs)


def layout_of(inputs: list[Any]) -> bytes | None:
    """How the inputs of a program lie, on which hangs how all else in it lies: their dtypes, shapes and strides. None unless they are torch's own
    tensors in host memory, and nothing stands between a call and torch's kernels."""
    return layouts(inputs) if not _modes() else None
