"""The bytes that each process sends in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from fusible.compute_pipeline import CONTEXT_PARALLEL, Sent, expert_parallel, messages_of
from fusible.distributed.cost.architectures import Architecture, BlockKind, Experts, elements
from fusible.distributed.cost.layout import Layout, Part, plan_of
from fusible.nvte import DType, PassKind, nvte_dtype
from fusible.ops import CombineTokens, DispatchTokens, Op
from fusible.ops.messages import Communicates
from fusible.ops.sharing import Process
from fusible.quantized import Recipe

__all__ = ["Traffic", "block_messages", "exchanged_with_experts", "traffic"]

_PASSES: tuple[PassKind, ...] = ("forward", "backward")
_WAYS = frozenset(kind.__name__ for kind in CONTEXT_PARALLEL.values())


@dataclass(frozen=True)
class Traffic:
    """Bytes that each process sends in a step, by what for: of all its blocks along ``tp`` and ``cp``; of parameters and gradients along ``dp_shard``
    together with ``cp`` and ``ep``, and of gradients along ``dp_replicate``; of tokens to experts and back along ``ep``; and from stage to stage."""

    tp: float
    cp: float
    dp_shard: float
    dp_replicate: float
    ep: float = 0.0
    pp: float = 0.0

    @property
    def total(self) -> float:
        return self.tp + self.cp + self.dp_shard + self.dp_replicate + self.ep + self.pp


def block_messages(
    architecture: Architecture,
    layout: Layout,
    recipe: Recipe | None,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    kind: BlockKind | None = None,
) -> list[Sent]:
    """The messages of forward and backward of one block, in order, where each process has ``tokens`` of its own along ``cp`` and the data dimensions.

    Where rows are shared out, they are so on both sides of the block. ``kind``: of the block, the first by default; what goes to experts is not among
    the messages. Raises what ``parallelize`` raises for sizes that do not divide.
    """
    plan = plan_of("block", architecture, kind or architecture.kinds[0], layout, recipe, dtype, DType.Float32)
    rows = layout.rows(tokens)
    return [sent for of in _PASSES for sent in messages_of(plan, of, rows)]


def exchanged_with_experts(architecture: Architecture, kind: BlockKind, layout: Layout, tokens: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """The bytes that each process sends along ``ep`` for one block in a step, where tokens are spread evenly: those of the ops at which tokens go to
    their experts, and come back."""
    if kind.experts is None or layout.ep == 1:
        return 0.0
    return _exchanged(kind.experts, architecture.hidden, layout.ep, layout.rows(tokens), dtype)


@cache
def _exchanged(experts: Experts, hidden: int, processes: int, rows: int, dtype: torch.dtype) -> float:
    ends: list[Op] = [DispatchTokens(experts.count, experts.chosen), CombineTokens()]
    types = dict.fromkeys(("x_dtype", "dy_dtype", "dx_dtype"), nvte_dtype(dtype))
    nbytes = 0.0
    for made in expert_parallel(ends, Process(0, processes), None):
        op = made.op.with_(x_width=hidden, **types)
        assert isinstance(op, Communicates)
        nbytes += sum(message.sent(processes) for of in _PASSES for message in op.messages(of, rows))
        rows = op.rows_of_y(rows)
    return nbytes


def traffic(
    architecture: Architecture,
    layout: Layout,
    recipe: Recipe | None,
    tokens: int,
    dtype: torch.dtype = torch.bfloat16,
    microbatches: int = 1,
) -> Traffic:
    """What each process sends in a step on ``microbatches`` of ``tokens`` of its own. Parameters and gradients pass in ``dtype``: for each of them
    those of blocks are gathered before forward and before backward (``fully_shard`` of each block and of the model), those of the embedding, the last
    norm and the output before forward alone, and gradients are summed; over the copies they are summed once.

    Along ``pp`` a process has the share of a stage, and hands its activations on, and their gradients back: on average, for the first and the last
    stage do one of both.
    """
    tp = cp = ep = 0.0
    for kind in architecture.kinds:
        for sent in block_messages(architecture, layout, recipe, tokens, dtype, kind):
            nbytes = kind.count * sent.message.sent(sent.processes)
            if sent.op.title in _WAYS:
                cp += nbytes
            else:
                tp += nbytes
        ep += kind.count * exchanged_with_experts(architecture, kind, layout, tokens, dtype)
    of_stage = microbatches / layout.pp
    passed = 2 * layout.rows(tokens) * architecture.hidden * dtype.itemsize * (layout.pp - 1) / layout.pp
    gathered = reduced = 0.0
    for nbytes, shards, gathers in _sharded(architecture, layout, dtype):
        gathered += (gathers + 1) * microbatches * nbytes * (shards - 1) / shards
        reduced += 2 * nbytes / shards * (layout.dp_replicate - 1) / layout.dp_replicate
    return Traffic(tp * of_stage, cp * of_stage, gathered, reduced, ep * of_stage, passed * microbatches)


def _sharded(architecture: Architecture, layout: Layout, dtype: torch.dtype) -> list[tuple[float, int, int]]:
    """The bytes of the parameters of a process together with those that it shares them out with, how many these are, and how often they are gathered:
    of blocks, of what is before and behind these, and of experts; routers are with the blocks."""

    def own(part: Part, kind: BlockKind) -> int:
        return elements(plan_of(part, architecture, kind, layout, None, dtype, DType.Float32).ops)

    each, hidden = dtype.itemsize / layout.pp, architecture.hidden
    blocks = experts = 0.0
    for kind in architecture.kinds:
        blocks += kind.count * own("block", kind)
        if kind.experts is not None:
            blocks += kind.count * kind.experts.count * hidden
            experts += kind.count * kind.experts.count * own("expert", kind) / layout.ep
    ends = 2 * math.ceil(architecture.vocabulary / layout.tp) * hidden + hidden
    return [(blocks * each, layout.shards, 2), (ends * each, layout.shards, 1), (experts * each, layout.expert_shards, 2)]
