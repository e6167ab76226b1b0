"""Layouts: how many processes share what, and what an op list becomes in one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal

import torch

from fusible.compute_pipeline import (
    CONTEXT_PARALLEL,
    ComputePipeline,
    Plan,
    PlanRequest,
    Rewritten,
    context_parallel,
    fusion_epoch,
    tensor_parallel,
)
from fusible.distributed.cost.architectures import Architecture, BlockKind, weight_of
from fusible.errors import ArgumentError, expected
from fusible.nvte import DType, nvte_dtype
from fusible.ops import Op
from fusible.ops.sharing import Process
from fusible.quantized import Recipe
from fusible.tex.protocol import PlannedGroup

__all__ = ["Layout", "held_rows", "joined", "plan_of"]

Part = Literal["block", "expert", "head"]


@dataclass(frozen=True)
class Layout:
    """How many processes share what: the sizes of a mesh's dimensions. ``sequence_parallel`` and ``context``: as of ``parallelize``.

    Along ``ep`` each process has its own tokens, its share of the experts, and all of what is no expert; along ``tp``, where rows are shared out, its
    share of the experts, too. Parameters are sharded along ``dp_shard`` and ``cp`` together. Along ``pp`` processes have stages of equally many
    blocks. ``gather_quantized``: whether weights of products are gathered as the recipe quantizes them (the function of that name).
    """

    tp: int = 1
    cp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    sequence_parallel: bool = False
    context: str = "all_to_all"
    ep: int = 1
    pp: int = 1
    gather_quantized: bool = False

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if size < 1:
                raise ArgumentError(expected("at least 1", of=f"{name} of a Layout", got=size, do="give a number of processes"))

    @property
    def sizes(self) -> dict[str, int]:
        """By dimension, from the one whose processes are the nearest to one another."""
        return {name: getattr(self, name) for name in ("tp", "cp", "ep", "dp_shard", "pp", "dp_replicate")}

    @cached_property
    def rewriting(self) -> Layout:
        """What of it decides how an op list is rewritten."""
        return Layout(self.tp, self.cp, sequence_parallel=self.tp > 1 and self.sequence_parallel, context=self.context)

    @property
    def processes(self) -> int:
        return self.tp * self.cp * self.ep * self.dp_shard * self.pp * self.dp_replicate

    @property
    def batches(self) -> int:
        """The processes that have batches of their own."""
        return self.ep * self.dp_shard * self.dp_replicate

    @property
    def shards(self) -> int:
        """The processes that share out each parameter of those that they have alike."""
        return self.dp_shard * self.cp

    @property
    def of_experts(self) -> int:
        """The processes that have tokens of their own, and each its share of the experts."""
        return self.ep * (self.tp if self.sequence_parallel else 1)

    def rows(self, tokens: int) -> int:
        """The rows between spans of shared columns in a process, where it has ``tokens``."""
        return tokens // self.tp if self.tp > 1 and self.sequence_parallel else tokens

    def __str__(self) -> str:
        named = [f"{name} {size}" for name, size in self.sizes.items() if size > 1]
        return ", ".join([*named, *(["rows"] if self.tp > 1 and self.sequence_parallel else [])]) or "one process"


def plan_of(
    part: Part, architecture: Architecture, kind: BlockKind, layout: Layout, recipe: Recipe | None, dtype: torch.dtype, stored: DType
) -> Plan:
    """The plan, in the first process, of a block of a kind without its experts, of one of these, or of the last norm and the output, whose logits
    processes along ``tp`` share out. ``stored``: the type in which parameters come."""
    return _made(part, architecture, kind, layout.rewriting, recipe, dtype, stored, fusion_epoch())


@cache
def _made(
    part: Part, architecture: Architecture, kind: BlockKind, layout: Layout, recipe: Recipe | None, dtype: torch.dtype, stored: DType, fusions: int
) -> Plan:
    if part == "expert":  # of which a process has whole ones
        layout = Layout()
    made = _of_process(_ops(part, architecture, kind), layout, shared_output=part == "head")
    args = tuple(tuple((stored, True) for _ in op.arg_names) for op in made)
    request = PlanRequest(recipe, nvte_dtype(dtype), architecture.hidden, True, args, (True,) * len(made), True, fusions)
    return ComputePipeline(made).plan(request)


def _ops(part: Part, architecture: Architecture, kind: BlockKind) -> list[Op]:
    if part == "expert":
        assert kind.experts is not None
        return architecture.expert(kind.experts)
    return architecture.head() if part == "head" else architecture.block(kind.inner)


def joined(architecture: Architecture, kind: BlockKind, layout: Layout) -> frozenset[int]:
    """The places, among a block's parameters, of those that processes hold in several tensors (q, k and v; a gate and what it multiplies): each pass
    makes one of these."""
    return _joined(architecture, kind, layout.rewriting)


@cache
def _joined(architecture: Architecture, kind: BlockKind, layout: Layout) -> frozenset[int]:
    rewritten = _rewritten(architecture.block(kind.inner), layout) if layout.tp > 1 else []
    holdings = [holding for r in rewritten for holding in r.holdings.values()]
    return frozenset(place for place, holding in enumerate(holdings) if len(holding.parts) > 1)


def held_rows(part: Part, architecture: Architecture, kind: BlockKind, layout: Layout) -> list[tuple[int, ...] | None]:
    """For each parameter of a part, in order, the rows of the tensors as which the first process holds it; None where it takes lines of one."""
    whole = _ops(part, architecture, kind)
    if layout.tp == 1 or part == "expert":
        return [(parameter.shape[0],) for op in whole for parameter in op.args]
    process = Process(0, layout.tp)
    found: list[tuple[int, ...] | None] = []
    for rewritten in _rewritten(whole, layout, shared_output=part == "head"):
        for name, holding in rewritten.holdings.items():
            first, apart = _local_shape(rewritten, name, process)[0], holding.dim == 0 and len(holding.parts) > 1
            lines = holding.dim is not None and not all(of.shared(process.size) for of in holding.parts)
            found.append(None if lines else tuple(len(of.of(process)) for of in holding.parts) if apart else (first,))
    return found


def _rewritten(block: Sequence[Op], layout: Layout, *, shared_output: bool = False) -> list[Rewritten]:
    process, group = Process(0, layout.tp), PlannedGroup(layout.tp)
    return tensor_parallel(block, process, group, sequence_parallel=layout.sequence_parallel, shared_output=shared_output)


def _of_process(block: Sequence[Op], layout: Layout, *, shared_output: bool = False) -> list[Op]:
    """The block in the first process."""
    made = list(block)
    if layout.tp > 1:
        process = Process(0, layout.tp)
        rewritten = _rewritten(made, layout, shared_output=shared_output)
        made = [r.op.with_(**{name: weight_of(*_local_shape(r, name, process)) for name in r.holdings}) for r in rewritten]
    if layout.cp > 1:
        if layout.context not in CONTEXT_PARALLEL:
            wanted = " or ".join(map(repr, CONTEXT_PARALLEL))
            raise ArgumentError(expected(wanted, of="context of a Layout", got=repr(layout.context), do="name one of these"))
        made = context_parallel(made, Process(0, layout.cp), PlannedGroup(layout.cp), layout.context)
    return made


def _local_shape(rewritten: Rewritten, name: str, process: Process) -> list[int]:
    """The shape of what a process has of a parameter."""
    shape, holding = list(getattr(rewritten.op, name).shape), rewritten.holdings[name]
    if holding.dim is not None:
        shape[holding.dim] = sum(len(part.of(process)) for part in holding.parts)
    return shape
