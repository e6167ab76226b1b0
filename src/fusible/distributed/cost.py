"""What a layout costs, derived from the op list that it becomes: the bytes that each process sends in a step.

The op list is that of one transformer block, rewritten as ``parallelize`` rewrites a model's; its plan says what passes between processes, as
``explain`` does. Nothing is computed, and no memory is taken: parameters have shapes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fusible import ops
from fusible.compute_pipeline import (
    CONTEXT_PARALLEL,
    ComputePipeline,
    Plan,
    PlanRequest,
    Rewritten,
    Sent,
    context_parallel,
    fusion_epoch,
    messages_of,
    tensor_parallel,
)
from fusible.errors import ArgumentError, expected
from fusible.nvte import DType, Tensor, make_nvte_tensor, nvte_dtype
from fusible.ops import Op
from fusible.ops.sharing import Process
from fusible.quantized import Recipe

__all__ = ["ARCHITECTURES", "Architecture", "Layout", "Traffic", "block_messages", "traffic"]


@dataclass(frozen=True)
class Architecture:
    """A decoder of ``layers`` blocks: RMS norms, ``heads`` that share ``groups`` of keys and values, and a gated feed-forward layer, ``inner`` wide;
    no biases. ``vocabulary``: of the embedding and of the output."""

    layers: int
    hidden: int
    heads: int
    groups: int
    inner: int
    vocabulary: int

    @cached_property
    def block_parameters(self) -> int:
        """The parameters of one block."""
        width = self.hidden // self.heads
        return self.hidden * (2 * self.hidden + 2 * self.groups * width + 3 * self.inner + 2)

    @property
    def parameters(self) -> int:
        """Of all blocks, the last norm, the embedding and the output."""
        return self.layers * self.block_parameters + self.hidden + 2 * self.vocabulary * self.hidden

    def block(self) -> list[Op]:
        """The ops of one block."""
        h, width = self.hidden, self.hidden // self.heads
        attention = ops.DotProductAttention(self.heads, width, groups=self.groups, rope_base=10000.0)
        qkv, up = (self.heads + 2 * self.groups) * width, 2 * self.inner
        return [
            *(ops.ResidualBegin(), ops.RMSNorm(_shape(h)), ops.MMT(_shape(qkv, h)), attention, ops.MMT(_shape(h, h)), ops.ResidualEnd()),
            *(ops.ResidualBegin(), ops.RMSNorm(_shape(h)), ops.MMT(_shape(up, h)), ops.SwiGLU(), ops.MMT(_shape(h, self.inner)), ops.ResidualEnd()),
        ]


ARCHITECTURES = {
    "llama-7b": Architecture(32, 4096, 32, 32, 11008, 32000),
    "llama-70b": Architecture(80, 8192, 64, 8, 28672, 32000),
}
"""Llama 2 (Touvron et al. 2023, arXiv:2307.09288, and its published configurations)."""


@dataclass(frozen=True)
class Layout:
    """How many processes share what: the sizes of a mesh's dimensions. ``sequence_parallel`` and ``context``: as of ``parallelize``."""

    tp: int = 1
    cp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    sequence_parallel: bool = False
    context: str = "all_to_all"

    @property
    def processes(self) -> int:
        return self.tp * self.cp * self.dp_shard * self.dp_replicate


@dataclass(frozen=True)
class Traffic:
    """Bytes that each process sends in a step, by what for: of all blocks along ``tp`` and ``cp``; of parameters and gradients along ``dp_shard``
    together with ``cp``, and of gradients along ``dp_replicate``."""

    tp: float
    cp: float
    dp_shard: float
    dp_replicate: float


def block_messages(architecture: Architecture, layout: Layout, recipe: Recipe | None, tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[Sent]:
    """The messages of forward and backward of one block, in order, where each process has ``tokens`` of its own along ``cp`` and the data dimensions.

    Where rows are shared out, they are so on both sides of the block. Raises what ``parallelize`` raises for sizes that do not divide.
    """
    plan = _plan(_of_process(architecture.block(), layout), recipe, dtype, architecture.hidden)
    rows = tokens // layout.tp if layout.tp > 1 and layout.sequence_parallel else tokens
    return [sent for kind in ("forward", "backward") for sent in messages_of(plan, kind, rows)]


def traffic(architecture: Architecture, layout: Layout, recipe: Recipe | None, tokens: int, dtype: torch.dtype = torch.bfloat16) -> Traffic:
    """What each process sends in a step on ``tokens`` of its own. Parameters and gradients pass in ``dtype``: parameters are gathered before forward
    and before backward (``fully_shard``), and gradients summed."""
    along = {"tp": 0.0, "cp": 0.0}
    ways = {kind.__name__ for kind in CONTEXT_PARALLEL.values()}
    for sent in block_messages(architecture, layout, recipe, tokens, dtype):
        along["cp" if sent.op.title in ways else "tp"] += sent.message.sent(sent.processes)
    shards, copies = layout.dp_shard * layout.cp, layout.dp_replicate
    held = architecture.parameters / layout.tp * dtype.itemsize
    return Traffic(
        tp=architecture.layers * along["tp"],
        cp=architecture.layers * along["cp"],
        dp_shard=3 * held * (shards - 1) / shards,
        dp_replicate=2 * held / shards * (copies - 1) / copies,
    )


def _of_process(block: Sequence[Op], layout: Layout) -> list[Op]:
    """The block in the first process."""
    made = list(block)
    if layout.tp > 1:
        process = Process(0, layout.tp)
        rewritten = tensor_parallel(made, process, None, sequence_parallel=layout.sequence_parallel)
        made = [r.op.with_(**{name: _shape(*_held(r, name, process)) for name in r.holdings}) for r in rewritten]
    if layout.cp > 1:
        if layout.context not in CONTEXT_PARALLEL:
            wanted = " or ".join(map(repr, CONTEXT_PARALLEL))
            raise ArgumentError(expected(wanted, of="context of a Layout", got=repr(layout.context), do="name one of these"))
        made = context_parallel(made, Process(0, layout.cp), None, layout.context)
    return made


def _held(rewritten: Rewritten, name: str, process: Process) -> list[int]:
    """The shape of what a process has of a parameter."""
    shape, holding = list(getattr(rewritten.op, name).shape), rewritten.holdings[name]
    if holding.dim is not None:
        shape[holding.dim] = sum(len(part.of(process)) for part in holding.parts)
    return shape


def _shape(*sizes: int) -> Tensor:
    """A parameter in fp32 of that shape, without memory."""
    return make_nvte_tensor(torch.empty(sizes, device="meta"))


def _plan(of_process: Sequence[Op], recipe: Recipe | None, dtype: torch.dtype, width: int) -> Plan:
    args = tuple(tuple((DType.Float32, True) for _ in op.arg_names) for op in of_process)
    modes = (True,) * len(of_process)
    return ComputePipeline(of_process).plan(PlanRequest(recipe, nvte_dtype(dtype), width, True, args, modes, False, fusion_epoch()))
