"""The time of a step, from published speeds of machines and links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from fusible import nvte
from fusible.compute_pipeline import Plan
from fusible.distributed.cost.architectures import Architecture, BlockKind
from fusible.distributed.cost.layout import Layout, Part, plan_of
from fusible.distributed.cost.passes import pass_memory
from fusible.distributed.cost.traffic import Traffic, traffic
from fusible.ops import MMT, DotProductAttention
from fusible.quantized import Recipe

__all__ = ["H100", "Machine", "StepTime", "step_time"]


@dataclass(frozen=True)
class Machine:
    """A kind of machine: GPUs in nodes. ``flops``: dense products a second by the bits of an operand. ``memory``: bytes of one GPU, ``bandwidth``:
    its bytes a second. ``inside`` and ``outside``: bytes a second that one GPU sends within a node of ``node`` GPUs, and to other nodes.
    ``efficiency``: the share of ``flops`` that products reach, and ``usable``: that of ``memory`` which tensors can fill."""

    name: str
    flops: Mapping[int, float]
    memory: float
    bandwidth: float
    inside: float
    outside: float
    node: int = 8
    efficiency: float = 0.6
    usable: float = 0.92

    def products(self, bits: int) -> float:
        """Products a second that are reached with operands of so many bits: those of the next kind that there is."""
        return self.flops[min((of for of in self.flops if of >= bits), default=max(self.flops))] * self.efficiency

    def link(self, layout: Layout, dimension: str) -> float:
        """Bytes a second along a dimension of a layout, whose processes lie side by side in the order of ``Layout.sizes``: within a node where all of
        them fit in it together with those of the dimensions before."""
        reach = 1
        for name, size in layout.sizes.items():
            reach *= size
            if name == dimension:
                break
        return self.inside if reach <= self.node else self.outside


H100 = Machine(
    name="H100 SXM",
    flops={8: 1979e12, 16: 989e12, 32: 67e12},
    memory=80e9,
    bandwidth=3.35e12,
    inside=450e9,
    outside=50e9,
)
"""NVIDIA's data sheet of the H100 SXM: 989 dense bf16 and 1,979 dense FP8 TFLOPS, 67 in fp32, 80 GB at 3.35 TB/s, NVLink of 900 GB/s in both
directions together; in a DGX H100, eight of them, each with a network port of 400 Gb/s (InfiniBand NDR). ``efficiency`` and ``usable`` are
assumptions, not measurements."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step. ``products``: matrix products and attention. ``memory``: what ops write and the next ones read. ``sent``: by dimension,
    how long the bytes take on their links, and ``exposed`` which part of that nothing hides. ``bubble``: that a stage waits for others. ``tokens``:
    that all processes train on."""

    products: float
    memory: float
    sent: Mapping[str, float]
    exposed: Mapping[str, float]
    bubble: float
    tokens: int
    processes: int

    @property
    def total(self) -> float:
        return self.products + self.memory + sum(self.exposed.values()) + self.bubble

    @property
    def hidden(self) -> float:
        """The share of the communication that computing hides; 1 where there is none."""
        sent = sum(self.sent.values())
        return 1 - sum(self.exposed.values()) / sent if sent else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Of each process."""
        return self.tokens / self.total / self.processes


def step_time(
    architecture: Architecture,
    layout: Layout,
    recipe: Recipe | None,
    tokens: int,
    sequence: int,
    dtype: torch.dtype = torch.bfloat16,
    microbatches: int = 1,
    machine: Machine = H100,
    turns: int = 1,
) -> StepTime:
    """A step on ``microbatches`` of ``tokens`` of each process's own, in sequences of ``sequence`` tokens.

    Products of forward and the two of backward cost ``6 tokens N K`` each, by the types that the plan gives their operands; causal attention costs
    ``6 tokens sequence hidden`` in 16 bits. Exposed are the messages along ``tp``, ``ep`` and, with heads exchanged, ``cp``, for the next product
    waits for them; and of the gathers along ``dp_shard``, the sums along ``dp_replicate`` and keys that go round a ring what takes longer than the
    computing beside it (two thirds of a step, its backward, for the sums). A stage waits ``(pp - 1) / microbatches`` of its own time for others
    (Narayanan et al. 2021, arXiv:2104.04473): its share of the step is ``(pp - 1) / (microbatches + pp - 1)``. ``turns``: of the schedule in a step,
    each of as many micro-batches; a stage waits in each.
    """
    products, memory = _computing(architecture, layout, recipe, tokens, sequence, dtype, machine)
    products, memory = products * microbatches, memory * microbatches
    sent = _sent(traffic(architecture, layout, recipe, tokens, dtype, microbatches), layout, machine)
    computing = products + memory
    beside = {"dp_shard": computing, "dp_replicate": computing * 2 / 3, "pp": computing}
    if layout.context == "ring":
        beside["cp"] = computing
    exposed = {name: max(0.0, seconds - beside.get(name, 0.0)) for name, seconds in sent.items()}
    bubble = (computing + sum(exposed.values())) * (layout.pp - 1) * turns / microbatches
    of_all = tokens * layout.cp * layout.batches * microbatches
    return StepTime(products, memory, sent, exposed, bubble, of_all, layout.processes)


def _sent(found: Traffic, layout: Layout, machine: Machine) -> dict[str, float]:
    """Seconds by dimension. Parameters are shared out along ``cp`` and ``dp_shard`` together, so by the slower link of these."""
    names = ("tp", "cp", "ep", "dp_shard", "pp", "dp_replicate")
    return {name: nbytes / machine.link(layout, name) for name in names if (nbytes := getattr(found, name))}


@cache
def products_of(plan: Plan) -> tuple[tuple[int, int], ...]:
    """For each matrix product of a plan the bits of its operands, and the multiplications of forward and backward for each row of its x."""
    found: list[tuple[int, int]] = []
    for op in plan.ops:
        if isinstance(op, MMT):
            type = op.type_of("x") or getattr(op, "whole_dtype", None) or plan.activation
            n, k = op.weight.shape
            found.append((nvte.bit_width(nvte.element(type)), 6 * n * k))
    return tuple(found)


def _computing(
    architecture: Architecture, layout: Layout, recipe: Recipe | None, tokens: int, sequence: int, dtype: torch.dtype, machine: Machine
) -> tuple[float, float]:
    """Seconds of products and of moving memory, for a micro-batch of one stage; the output's are shared out to the stages, as it were a block."""
    rows = layout.rows(tokens)
    gathered = tokens // rows
    products = memory = 0.0
    arrive = nvte.nvte_dtype(dtype)
    parts: list[tuple[Part, BlockKind, int, int]] = [("head", architecture.kinds[0], 1, 1)]
    for kind in architecture.kinds:
        parts.append(("block", kind, kind.count, 1))
        if kind.experts is not None:
            parts.append(("expert", kind, kind.count, kind.experts.chosen))
    for part, kind, count, times in parts:
        of_rows, of_tokens = rows * times, (rows if part == "expert" else tokens) * times
        plan = plan_of(part, architecture, kind, layout, recipe, dtype, arrive)
        products += count * sum(flops * of_tokens / machine.products(bits) for bits, flops in products_of(plan))
        memory += count * 2 * pass_memory(plan, of_rows, gathered).written / machine.bandwidth
        attention = sum(op.heads * op.head_width for op in plan.ops if isinstance(op, DotProductAttention))
        products += count * 6 * of_tokens * sequence * attention / machine.products(16)
    return products / layout.pp, memory / layout.pp
