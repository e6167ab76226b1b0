"""The best layout for a number of processes: all that divide it, those that do not fit left out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch

from fusible.distributed.cost.architectures import Architecture
from fusible.distributed.cost.layout import Layout
from fusible.distributed.cost.memory import Memory, memory
from fusible.distributed.cost.time import H100, Machine, StepTime, step_time
from fusible.distributed.cost.traffic import Traffic, traffic
from fusible.errors import ArgumentError, expected
from fusible.pytorch.product_weights import WEIGHT
from fusible.quantized import Quantizer, Recipe, quantizer_for_role

__all__ = ["Candidate", "best_layouts", "layouts"]

_TOGETHER = (1, 2)
"""Sequences in a micro-batch."""
_LONG = 16384
"""Tokens of a sequence from which on it is worth while to share it out along ``cp``: below, attention is a small part of a block."""


@dataclass(frozen=True)
class Candidate:
    """A layout with what it costs: ``memory`` of the fullest stage, ``traffic`` and ``time`` of a step of ``microbatches`` micro-batches of
    ``tokens`` tokens in each process, in as many ``turns`` of the stages' schedule as fit in a GPU's memory."""

    layout: Layout
    tokens: int
    microbatches: int
    turns: int
    memory: Memory
    traffic: Traffic
    time: StepTime

    @property
    def batches(self) -> str:
        """The micro-batches, and the tokens of each."""
        return f"{self.microbatches} x {self.tokens}{f' in {self.turns}' if self.turns > 1 else ''}"


def layouts(architecture: Architecture, processes: int, sequence: int = 4096, machine: Machine = H100) -> Iterator[Layout]:
    """Those that divide ``processes`` and the architecture: ``tp`` with rows shared out, and ``cp`` for long sequences, within a node and in powers
    of 2; stages of equally many blocks; and shards of parameters or copies of them."""
    count = architecture.experts.count if architecture.experts else 1
    for tp in _powers(processes, machine.node):
        for cp in _powers(processes // tp, machine.node // tp if sequence >= _LONG else 1):
            if architecture.heads % (tp * cp) or architecture.groups % (tp * cp):
                continue
            of_heads = processes // tp // cp
            for pp, ep in product(_divisors(of_heads, architecture.layers), _divisors(of_heads, count)):
                if of_heads % (pp * ep) or (architecture.experts and count % (ep * tp)):
                    continue
                data = of_heads // pp // ep
                for shards in _divisors(data, data):
                    yield Layout(tp, cp, shards, data // shards, sequence_parallel=tp > 1, ep=ep, pp=pp)


def best_layouts(
    architecture: Architecture,
    processes: int,
    recipe: Recipe | None,
    *,
    sequence: int = 4096,
    batch: int = 4 * 2**20,
    dtype: torch.dtype = torch.bfloat16,
    machine: Machine = H100,
    count: int = 5,
) -> list[Candidate]:
    """The ``count`` fastest of ``layouts`` for steps of ``batch`` tokens in sequences of ``sequence``, the best first; of each layout the micro-batch
    with which it is fastest. Of equally fast ones that which takes less memory. Where ``recipe`` scales weights by their own magnitudes, those that
    are shared out are gathered as it quantizes them (``gather_quantized``), as ``fusible train`` has it.

    Raises ``ArgumentError`` where there are no processes, where the batch is not of whole sequences, and where no layout fits in a GPU's memory.
    """
    if processes < 1:
        raise ArgumentError(expected("at least 1", of="the number of GPUs", got=processes, do="give how many there are"))
    if sequence < 1 or batch < sequence or batch % sequence:
        raise ArgumentError(expected(f"a multiple of {sequence}, a sequence's", of="the tokens of a batch", got=batch, do="give whole sequences"))
    found: dict[Layout, Candidate] = {}
    least: Candidate | None = None
    own = recipe is not None and isinstance(quantizer_for_role(recipe.immutable(), WEIGHT), Quantizer)
    for plain in layouts(architecture, processes, sequence, machine):
        layout = replace(plain, gather_quantized=own and plain.shards > 1)
        for tokens, microbatches in _shares(layout, sequence, batch):
            for turns in _turns(layout, microbatches):
                made = _memory(architecture, layout, recipe, tokens, dtype, microbatches, turns)
                fits = made.peak <= machine.memory * machine.usable
                if fits:
                    break
            if not fits and least is not None and least.memory.peak <= made.peak:
                continue
            time = step_time(architecture, layout, recipe, tokens, sequence, dtype, microbatches, machine, turns)
            one = Candidate(layout, tokens, microbatches, turns, made, traffic(architecture, layout, recipe, tokens, dtype, microbatches), time)
            if not fits:
                least = one
            elif layout not in found or time.total < found[layout].time.total:
                found[layout] = one
    if not found:
        got = (
            "none that divides them so that each has a sequence" if least is None else f"{least.memory.peak / 1e9:,.0f} GB at least ({least.layout})"
        )
        wanted = f"a layout that fits in the {machine.memory / 1e9:,.0f} GB of one {machine.name}"
        raise ArgumentError(expected(wanted, of=f"{processes} GPUs", got=got, do="take more GPUs, or another batch"))
    return sorted(found.values(), key=lambda one: (one.time.total, one.memory.peak))[:count]


def _memory(
    architecture: Architecture, layout: Layout, recipe: Recipe | None, tokens: int, dtype: torch.dtype, microbatches: int, turns: int
) -> Memory:
    """That of the fullest stage: of the first, which has the most under way, or the last, which has the output."""
    ends = {0, layout.pp - 1}
    return max((memory(architecture, layout, recipe, tokens, dtype, microbatches, stage, turns) for stage in ends), key=lambda of: of.peak)


def _turns(layout: Layout, microbatches: int) -> tuple[int, ...]:
    """In how many turns stages may take them; each has at least as many as there are stages."""
    return _powers(microbatches, max(1, microbatches // layout.pp) if layout.pp > 1 else 1)


def _shares(layout: Layout, sequence: int, batch: int) -> Iterator[tuple[int, int]]:
    """The tokens of a process in a micro-batch, and the number of micro-batches."""
    sequences = batch // sequence
    if sequences % layout.batches or sequence % (2 * layout.cp * layout.tp):
        return
    own = sequences // layout.batches
    for together in _TOGETHER:
        if own % together == 0:
            yield together * sequence // layout.cp, own // together


@cache
def _divisors(number: int, other: int) -> tuple[int, ...]:
    """Of both."""
    both = math.gcd(number, other)
    return tuple(n for n in range(1, both + 1) if both % n == 0)


def _powers(number: int, most: int) -> tuple[int, ...]:
    return tuple(n for n in _divisors(number, number) if n <= most and not n & (n - 1))
