"""The bytes that each process sends in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from fusible.compute_pipeline import CONTEXT_PARALLEL, Sent, expert_parallel, messages_of
from fusible.distributed.cost.architectures import Architecture, BlockKind, Experts, elements
from fusible.distributed.cost.gathered import Gathered, gathered
from fusible.distributed.cost.layout import Layout, Part, plan_of
from fusible.nvte import DType, PassKind, nvte_dtype
from fusible.ops import CombineTokens, DispatchTokens, Op
from fusible.ops.messages import Communicates
from fusible.ops.sharing import Process
from fusible.quantized import Recipe

__all__ = ["Traffic", "block_messages", "exchanged_with_experts", "traffic"]

_PASSES: tuple[PassKind, ...] = ("forward", "backward")
_FP32 = 4
_AMAX = 2 * _FP32
"""Bytes by which a largest magnitude is exchanged."""
_WAYS = frozenset(kind.__name__ for kind in CONTEXT_PARALLEL.values())


@dataclass(frozen=True)
class Traffic:
    """Bytes that each process sends in a step, by what for: of all its blocks along ``tp`` and ``cp``; of parameters and gradients along ``dp_shard``
    together with ``cp``, and of gradients along ``dp_replicate``; along ``ep`` (and ``tp`` with rows shared out) of tokens to experts and back, and
    of the gradients of what is no expert; and from stage to stage."""

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
    """The bytes that each process sends along ``ep``, and ``tp`` where rows are shared out, for one block in a step, where tokens are spread evenly:
    those of the ops at which tokens go to their experts, and come back."""
    if kind.experts is None or layout.of_experts == 1:
        return 0.0
    return _exchanged(kind.experts, architecture.hidden, layout.of_experts, layout.rows(tokens), dtype)


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
    norm and the output before forward alone, and gradients are summed; over the copies they are summed once. With ``layout.gather_quantized`` weights
    of products are gathered as ``recipe`` quantizes them.

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
    sent = reduced = 0.0
    shards = layout.shards
    for times, of, gradients, along_ep in _sharded(architecture, layout, recipe, dtype):
        once = of.nbytes + of.amaxes * _AMAX
        sent += (times * once + gradients) / layout.pp * microbatches * (shards - 1) / shards
        reduced += 2 * gradients / layout.pp / shards * (layout.dp_replicate - 1) / layout.dp_replicate
        # Where no shards are gathered, parameters come as they are held, and gradients like them.
        ep += 2 * gradients * (1 if shards > 1 else _FP32 / dtype.itemsize) * (along_ep - 1) / along_ep
    return Traffic(tp * of_stage, cp * of_stage, sent, reduced, ep * of_stage, passed * microbatches)


def _sharded(architecture: Architecture, layout: Layout, recipe: Recipe | None, dtype: torch.dtype) -> list[tuple[int, Gathered, float, int]]:
    """How often the parameters of a process, together with those that it shares them out with, are gathered, and what; the bytes of their gradients;
    and how many processes along ``ep`` sum these: of blocks, of what is before and behind these, and of experts; routers are with the blocks."""

    def own(part: Part, kind: BlockKind) -> Gathered:
        return gathered(part, architecture, kind, layout, recipe, dtype, layout.shards)

    def plain(count: float) -> Gathered:
        return Gathered(count * dtype.itemsize, 0, 0)

    found: list[tuple[int, Gathered, float, int]] = []
    for kind in architecture.kinds:
        of = own("block", kind)
        router = 0 if kind.experts is None else kind.experts.count * architecture.hidden * dtype.itemsize
        whole = elements(plan_of("block", architecture, kind, layout, None, dtype, DType.Float32).ops) * dtype.itemsize + router
        found.append((2, Gathered(kind.count * (of.nbytes + router), kind.count * of.amaxes, 0), kind.count * whole, layout.ep))
        if kind.experts is not None:
            count, of = kind.count * kind.experts.count / layout.of_experts, own("expert", kind)
            whole = elements(plan_of("expert", architecture, kind, layout, None, dtype, DType.Float32).ops) * dtype.itemsize
            found.append((2, Gathered(count * of.nbytes, 0, 0), count * whole, 1))
    embedding, head = plain(math.ceil(architecture.vocabulary / layout.tp) * architecture.hidden), own("head", architecture.kinds[0])
    of_head = embedding.nbytes + architecture.hidden * dtype.itemsize
    return [*found, (1, embedding, embedding.nbytes, layout.ep), (1, head, of_head, layout.ep)]
