"""The processes of a training command, as ``torchrun`` starts them: how they share the work, and what they tell one another."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from fusible.cli.training.options import BYTES, TrainOptions
from fusible.distributed import parallelize
from fusible.errors import ArgumentError, expected

__all__ = ["ALONE", "Layout", "Ranks", "launched"]

_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Layout:
    """How many processes share what. ``tensor``: columns; with ``sequence`` rows too. ``data``: each has its part of every batch; with ``shard`` they
    share out parameters, gradients and moments as well."""

    tensor: int = 1
    data: int = 1
    sequence: bool = False
    shard: bool = False

    @classmethod
    def from_command_line(cls, given: Mapping[str, Any], world: int) -> Layout:
        """The layout ``given`` for ``world`` processes; data parallelism takes what is left. Raises ``ArgumentError`` where it does not fit."""
        tensor = given.get("tensor_parallel", 1)
        for name, value in (("--tensor-parallel", tensor), ("--data-parallel", given.get("data_parallel", 1))):
            if value < 1:
                raise ArgumentError(expected("at least 1", of=name, got=value, do="give a number of processes"))
        data = given.get("data_parallel", max(world // tensor, 1))
        if tensor * data != world:
            got = f"--tensor-parallel {tensor} times --data-parallel {data}, which is {tensor * data}"
            do = f"start so many by torchrun --nproc-per-node {tensor * data}, or change one of them"
            raise ArgumentError(expected(f"the {world} that were started", of="the number of processes", got=got, do=do))
        layout = cls(tensor, data, bool(given.get("sequence_parallel")), bool(given.get("shard_parameters")))
        for flag, on, count, along in (
            ("--sequence-parallel", layout.sequence, tensor, "tensor"),
            ("--shard-parameters", layout.shard, data, "data"),
        ):
            if on and count == 1:
                raise ArgumentError(expected(f"--{along}-parallel of 2 at least", of=flag, got="1", do="give more processes, or leave it out"))
        return layout

    def __str__(self) -> str:
        if self.tensor * self.data == 1:
            return ""
        rows, shards = " and rows" if self.sequence else "", ", which share out the parameters" if self.shard else ""
        return f" in each of {self.tensor} (columns{rows}) x {self.data} (data{shards}) processes"

    def check(self, options: TrainOptions) -> None:
        """Raise ``ArgumentError`` for a run that cannot be shared out so."""
        shares = [("--batch", options.batch, self.data), ("--heads", options.heads, self.tensor), ("--hidden", options.hidden, self.tensor)]
        shares += [("the vocabulary", BYTES, self.tensor)]
        if self.sequence:
            shares.append(("--batch times --seq-len of a process", options.batch // self.data * options.seq_len, self.tensor))
        for of, size, count in shares:
            if size % count:
                wanted = f"a multiple of {count}, the processes that share it"
                raise ArgumentError(expected(wanted, of=of, got=size, do="give another size or number of processes"))
        if self.tensor > 1 and options.executor != "eager":
            do = "leave --executor out: a compiled program is that of one process"
            raise ArgumentError(expected("eager", of="--executor with --tensor-parallel", got=options.executor, do=do))


class Ranks:
    """The processes of one command, of which this is the ``rank``-th. One alone sends nothing."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.layout = Layout()
        self._mesh: DeviceMesh | None = None

    @property
    def met(self) -> bool:
        """Whether this process knows the others."""
        return self._mesh is not None

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and saves."""
        return self.rank == 0

    def begin(self, layout: Layout) -> None:
        """Meet the others."""
        self.layout = layout
        if self.world > 1:
            dist.init_process_group("gloo", timeout=_TIMEOUT)
            sizes = {"dp_replicate": 1 if layout.shard else layout.data, "dp_shard": layout.data if layout.shard else 1, "tp": layout.tensor}
            self._mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def end(self) -> None:
        """Part from the others."""
        if self.met:
            dist.destroy_process_group()

    @property
    def part(self) -> tuple[int, int]:
        """Which part of each batch is this process's, and of how many."""
        return self.rank // self.layout.tensor, self.layout.data

    @property
    def vocabulary_group(self) -> Any:
        """The processes that share out the logits; None where each has all."""
        return self._mesh["tp"].get_group() if self._mesh is not None and self.layout.tensor > 1 else None

    def lay_out(self, model: nn.Module) -> Callable[..., Any]:
        """Lay the model out on the processes; gives what is called in its place."""
        mesh, layout = self._mesh, self.layout
        if mesh is None:
            return model
        parallelize(model, mesh, sequence_parallel=layout.sequence, shared_output=True)
        if layout.data == 1:
            return model
        if layout.shard or layout.tensor > 1:  # DDP takes no DTensors: copies of the model are then shards of one process each
            fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
            return model
        return nn.parallel.DistributedDataParallel(model, process_group=mesh["dp_replicate"].get_group())

    def mean(self, values: Sequence[float]) -> list[float]:
        """The means over all processes."""
        if self.world == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return (sums / self.world).tolist()

    def any(self, flag: bool) -> bool:
        """Whether it is true in any process."""
        return self.mean([float(flag)])[0] > 0

    def largest(self, number: int) -> int:
        """The largest of all processes'."""
        if self.world == 1:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)


ALONE = Ranks(0, 1)
"""This process by itself."""


def launched() -> Ranks:
    """The processes that ``torchrun`` has started, or this one alone."""
    return Ranks(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
