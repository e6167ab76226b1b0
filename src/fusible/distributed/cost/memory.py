"""The memory that each process takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from fusible import nvte
from fusible.compute_pipeline import Plan
from fusible.distributed.cost.architectures import Architecture, BlockKind, elements
from fusible.distributed.cost.gathered import Gathered, gathered
from fusible.distributed.cost.layout import Layout, Part, joined, plan_of
from fusible.distributed.cost.passes import PassMemory, pass_memory
from fusible.errors import ArgumentError, expected
from fusible.nvte import DType, nvte_dtype
from fusible.quantized import Recipe

__all__ = ["Memory", "memory"]

_FP32 = 4
_ADAM = 2
"""Moments of each parameter (Kingma and Ba 2015, arXiv:1412.6980), in fp32 as it is."""
_LOSS = 1 << 22
"""The logits of which ``CrossEntropyLoss`` holds a copy in fp32 at once."""


@dataclass(frozen=True)
class Memory:
    """Bytes that a process takes.

    ``weights``: parameters, in fp32; ``gradients`` and ``optimizer``: of as many. ``copies``: of parameters, in the types of the products, and of
    those that are held in parts. ``activations``: what forward keeps for backward, of all micro-batches that are under way. ``logits``: with their
    gradient and what the loss needs. ``working``: what a block's backward holds at once beyond what is kept of the block. ``gathered``: parameters
    that are whole at a time, where processes share them out. ``handed``: between stages, room for what all micro-batches bring, and what has gone on
    and its gradient not yet come. ``added_up``: whether there are gradients before the last forward, of other
    micro-batches.
    """

    weights: int
    gradients: int
    optimizer: int
    copies: int
    activations: int
    logits: int
    working: int
    gathered: int
    handed: int
    added_up: bool

    @property
    def peak(self) -> int:
        """The most at once. Where a step has one micro-batch, gradients come as what is kept goes: either all of it is there, or all of them are."""
        begin = self.activations + max(self.logits, self.working)
        if self.added_up:
            begin += self.gradients
        return self.weights + self.optimizer + self.copies + self.gathered + self.handed + max(begin, self.gradients + self.working)


def memory(
    architecture: Architecture,
    layout: Layout,
    recipe: Recipe | None,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    microbatches: int = 1,
    stage: int = 0,
    turns: int = 1,
) -> Memory:
    """What a process takes that trains by AdamW on ``microbatches`` of ``tokens`` of its own at a time, with ``CrossEntropyLoss`` on logits that
    processes along ``tp`` share out, one forward and one backward by turns along ``pp`` (Narayanan et al. 2021, arXiv:2104.04473): then process
    ``stage`` of ``p`` has ``min(p - stage, microbatches)`` micro-batches under way, and ``torch.distributed.pipelining`` holds a place for the x and
    the dy of every micro-batch of a turn. ``turns``: of its schedule in a step, each of as many of the ``microbatches``.

    ``dtype``: of activations, and of parameters as they are gathered where processes share them out (``fully_shard`` of each block, with a
    ``MixedPrecisionPolicy``). Raises ``ArgumentError`` for a stage that there is not, or for blocks that cannot be cut into stages of equally many.
    """
    if architecture.layers % layout.pp or not 0 <= stage < layout.pp:
        wanted = f"a divisor of {architecture.layers} blocks as pp" if architecture.layers % layout.pp else f"a stage from 0 to {layout.pp - 1}"
        got = layout.pp if architecture.layers % layout.pp else stage
        raise ArgumentError(expected(wanted, of="the memory of a layout", got=got, do="choose another"))
    of_turn = microbatches // turns
    rows, under_way = layout.rows(tokens), min(layout.pp - stage, of_turn)
    parts = _Parts(architecture, layout, recipe, dtype, rows, tokens // rows)
    first, last = stage == 0, stage == layout.pp - 1
    in_stage = [(kind, kind.count / layout.pp) for kind in architecture.kinds]
    blocks = [(parts.block(kind), count) for kind, count in in_stage]
    held_elements = sum(parts.sharded(kind) * count for kind, count in in_stage)
    table = math.ceil(architecture.vocabulary / layout.tp) * architecture.hidden
    held_elements += (first * table + last * (table + architecture.hidden)) / layout.shards
    kept = sum(block.kept * count for block, count in blocks) * under_way
    copies = sum(block.copies * count for block, count in blocks)
    logits, whole = 0, parts.gathered(first, last)
    working = max(block.backward - block.kept for block, _ in blocks)
    if last:
        head = parts.head()
        copies += head.copies
        kept += head.kept
        logits = max(2 * head.y + _of_loss(head.y // dtype.itemsize, dtype), head.backward - head.kept)
    between = tokens * architecture.hidden * dtype.itemsize
    handed = 0 if first else (of_turn - under_way) * between
    handed += 0 if last else (of_turn + under_way) * between
    parameters = round(held_elements)
    return Memory(
        weights=_FP32 * parameters,
        gradients=_FP32 * parameters,
        optimizer=_ADAM * _FP32 * parameters,
        copies=round(copies),
        activations=round(kept),
        logits=logits,
        working=working,
        gathered=whole,
        handed=handed,
        added_up=microbatches > 1,
    )


def _of_loss(logits: int, dtype: torch.dtype) -> int:
    """What the loss holds beside logits and their gradient: a block of them in fp32, and what is made of it."""
    return min(logits, _LOSS) * _FP32 * (1 if dtype is torch.float32 else 2)


@dataclass(frozen=True)
class _Parts:
    """What the parts of a model hold in a process."""

    architecture: Architecture
    layout: Layout
    recipe: Recipe | None
    dtype: torch.dtype
    rows: int
    gathered_rows: int

    @property
    def arrive(self) -> DType:
        """The type in which parameters come to the passes."""
        return nvte_dtype(self.dtype) if self.layout.shards > 1 else DType.Float32

    def block(self, kind: BlockKind) -> PassMemory:
        """What a block holds, its experts included."""
        own = self._of("block", kind, self.rows)
        own = own._replace(copies=own.copies + self._joined(kind) - self._gathered("block", kind, self.layout.shards).spared)
        if kind.experts is None:
            return own
        experts, local = kind.experts, kind.experts.count // self.layout.of_experts
        routed = self._of("expert", kind, self.rows * experts.chosen)
        copies = own.copies + local * (routed.copies - self._gathered("expert", kind, self.layout.shards).spared)
        arrived = routed.kept + self.rows * experts.chosen * self.architecture.hidden * self.dtype.itemsize
        return PassMemory(copies, own.kept + arrived, own.y, own.backward + routed.backward, own.written + routed.written)

    def head(self) -> PassMemory:
        own, kind = self._of("head", self.architecture.kinds[0], self.rows), self.architecture.kinds[0]
        return own._replace(copies=own.copies - self._gathered("head", kind, self.layout.shards).spared)

    def sharded(self, kind: BlockKind) -> float:
        """The parameters of a block that the process has."""
        return self._parameters(kind) / self.layout.shards

    def gathered(self, first: bool, last: bool) -> int:
        """The bytes of what is whole at a time where parameters are shared out: two blocks' parameters, as the next is gathered while one computes;
        and the embedding and the output, which stay whole from forward to backward."""
        if self.layout.shards == 1:
            return 0
        whole = {kind: self._whole(kind) for kind in self.architecture.kinds}
        order = self.architecture.order
        most = max(whole[kind] + whole[following] for kind, following in pairwise(order if len(order) > 1 else 2 * order))
        table = math.ceil(self.architecture.vocabulary / self.layout.tp) * self.architecture.hidden * self.dtype.itemsize
        return round(most + first * table + last * self._gathered("head", self.architecture.kinds[0], self.layout.shards).nbytes)

    def _whole(self, kind: BlockKind) -> float:
        """The bytes of a block's parameters as they are gathered, those of its experts included."""
        found, experts = self._gathered("block", kind, self.layout.shards).nbytes, kind.experts
        if experts is None:
            return found
        found += experts.count * self.architecture.hidden * self.dtype.itemsize
        return found + (experts.count // self.layout.of_experts * self._gathered("expert", kind, self.layout.shards).nbytes)

    def _gathered(self, part: Part, kind: BlockKind, shards: int) -> Gathered:
        return gathered(part, self.architecture, kind, self.layout, self.recipe, self.dtype, shards)

    def _parameters(self, kind: BlockKind) -> float:
        """Those of a block in the processes that share them out along data dimensions, together."""
        own = elements(self._plan("block", kind).ops)
        if kind.experts is None:
            return own
        local = kind.experts.count // self.layout.of_experts
        router = kind.experts.count * self.architecture.hidden
        return own + router + local * elements(self._plan("expert", kind).ops)

    def _joined(self, kind: BlockKind) -> int:
        """The bytes of what is made of parameters that are held in several tensors, and kept unless it is quantized at once."""
        plan = self._plan("block", kind)
        places = joined(self.architecture, kind, self.layout) - {arg.place for arg in plan.quantized_args}
        parameters = [parameter for op in plan.ops for parameter in op.args]
        return sum(math.prod(parameters[place].shape) for place in places) * nvte.bit_width(self.arrive) // 8

    def _of(self, part: Part, kind: BlockKind, rows: int) -> PassMemory:
        return pass_memory(self._plan(part, kind), rows, self.gathered_rows)

    def _plan(self, part: Part, kind: BlockKind) -> Plan:
        return plan_of(part, self.architecture, kind, self.layout, self.recipe, self.dtype, self.arrive)
