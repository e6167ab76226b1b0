"""The processes of a training command, as ``torchrun`` starts them: how they share the work, and what they tell one another."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from fusible import tex
from fusible.cli.training.model import ByteGPT, Stage, cross_entropy
from fusible.cli.training.options import BLOCKS, BYTES, TrainOptions
from fusible.cli.training.schedule import AtOnce, InStages, Loss, Schedule, stages_of
from fusible.distributed import gather_quantized, gather_stages, gather_tensors, gathers_quantized, local_batch, parallelize
from fusible.distributed.exchange import gather_bytes
from fusible.ending import end_in_order
from fusible.errors import ArgumentError, ExecutionError, FileError, FusibleError, expected
from fusible.knobs import RANK, WORLD_SIZE
from fusible.pytorch import CrossEntropyLoss

__all__ = ["ALONE", "Layout", "Ranks", "launched", "together"]

_TIMEOUT = timedelta(seconds=30)
"""How long a process that has not gone may be silent. A step of the byte-level model takes a second, and so does a checkpoint."""
_OTHERS_NOTICE = 2.0
"""Seconds in which the others notice, too, that one does not answer."""
_OF_THE_GROUP = ("gloo", "connection closed", "connection reset", "timed out", "timeout", "broken pipe")
"""Words in torch's errors of a group whose process has gone, or does not answer."""


@dataclass(frozen=True)
class Layout:
    """How many processes share what. ``tensor``: columns; with ``sequence`` rows too. ``context``: parts of every window, which attention sees in the
    ``way``. ``data``: each has its part of every batch; with ``shard`` they share out parameters, gradients and moments as well. ``stages``: of the
    model, through which the part of a batch goes in ``microbatches``. ``experts``: each has its part of every batch, and of every mixture's
    experts, which those that share out rows share out, too."""

    tensor: int = 1
    context: int = 1
    data: int = 1
    way: str = "all_to_all"
    sequence: bool = False
    shard: bool = False
    stages: int = 1
    microbatches: int = 1
    experts: int = 1

    @property
    def batches(self) -> int:
        """How many processes have windows of their own."""
        return self.data * self.experts

    @classmethod
    def from_command_line(cls, arguments: Mapping[str, Any], world: int) -> Layout:
        """The layout that ``arguments`` ask for; data parallelism takes what is left. Raises ``ArgumentError`` where it does not fit."""
        sizes = {along: arguments.get(f"{along}_parallel", 1) for along in ("pipeline", "expert", "tensor", "context")}
        sizes["data"] = arguments.get("data_parallel", max(world // max(math.prod(sizes.values()), 1), 1))
        for along, value in sizes.items():
            if value < 1:
                raise ArgumentError(expected("at least 1", of=f"--{along}-parallel", got=value, do="give a number of processes"))
        stages, experts, tensor, context, data = sizes.values()
        needed = math.prod(sizes.values())
        if needed != world:
            got = f"{' x '.join(f'--{along}-parallel {value}' for along, value in sizes.items())}, {needed} in all"
            do = f"start so many by torchrun --nproc-per-node {needed}, or change one of them"
            raise ArgumentError(expected(f"the {world} that were started", of="the number of processes", got=got, do=do))
        way, sequence, shard = (
            arguments.get("context_way", cls.way),
            bool(arguments.get("sequence_parallel")),
            bool(arguments.get("shard_parameters")),
        )
        layout = cls(tensor, context, data, way, sequence, shard, stages, arguments.get("microbatches", stages), experts)
        needs = ("--sequence-parallel", sequence, tensor, "tensor"), ("--shard-parameters", shard, data, "data")
        needs += (("--microbatches", "microbatches" in arguments, stages, "pipeline"), ("--context-way", way != cls.way, context, "context"))
        for flag, on, count, along in needs:
            if on and count == 1:
                raise ArgumentError(expected(f"--{along}-parallel of 2 at least", of=flag, got="1", do="give more processes, or leave it out"))
        return layout

    def __str__(self) -> str:
        shared = [("columns and rows" if self.sequence else "columns", self.tensor), (f"tokens, {self.way}", self.context)]
        shared += [("data and parameters" if self.shard else "data", self.data), ("experts", self.experts)]
        shared += [(f"stages, {self.microbatches} microbatches", self.stages)]
        found = [f"{count} ({what})" for what, count in shared if count > 1]
        return f" in each of {' x '.join(found)} processes" if found else ""

    def check(self, options: TrainOptions) -> None:
        """Raise ``ArgumentError`` for a run that cannot be shared out so."""
        shares = [
            ("--batch", options.batch, self.batches),
            ("--experts", options.experts, self.experts * (self.tensor if self.sequence else 1)),
            ("--heads", options.heads, self.tensor),
            ("--hidden", options.hidden, self.tensor),
        ]
        shares += [("the vocabulary", BYTES, self.tensor)]
        if self.context > 1:
            shares.append(("--seq-len", options.seq_len, 2 * self.context))
        if self.context > 1 and self.way == "all_to_all":
            shares.append(("--heads", options.heads, self.tensor * self.context))
        if self.sequence:
            shares.append(("--batch times --seq-len of a process", options.batch // self.batches * options.seq_len // self.context, self.tensor))
        for of, size, count in shares:
            if size % count:
                wanted = f"a multiple of {count}, the processes that share it"
                raise ArgumentError(expected(wanted, of=of, got=size, do="give another size or number of processes"))
        if self.tensor * self.context * self.stages > 1 and options.executor != "eager":
            do = "leave --executor out: a compiled program is that of one process"
            of = "--executor with --tensor-parallel, --context-parallel or --pipeline-parallel"
            raise ArgumentError(expected("eager", of=of, got=options.executor, do=do))
        if self.experts > 1 and not options.experts:
            raise ArgumentError(expected("--experts", of="--expert-parallel", got="none", do="give a number of experts, or leave it out"))
        if self.stages > 1:
            self._check_stages(options)

    def _check_stages(self, options: TrainOptions) -> None:
        blocks = 2 * options.layers
        if self.stages > blocks:
            wanted = f"at most {blocks}, the blocks of attention and of products in --layers {options.layers}"
            raise ArgumentError(expected(wanted, of="--pipeline-parallel", got=self.stages, do="give more layers, or fewer stages"))
        if self.microbatches < self.stages:
            wanted = f"at least {self.stages}, the stages that work on them"
            raise ArgumentError(expected(wanted, of="--microbatches", got=self.microbatches, do="give more, or fewer stages"))
        windows = options.batch // self.batches
        if windows % self.microbatches:
            do = "give another size or number of microbatches"
            raise ArgumentError(expected(f"a multiple of the {self.microbatches} microbatches", of="--batch of a process", got=windows, do=do))
        rows = windows // self.microbatches * options.seq_len // self.context
        for count, what in (
            (self.tensor if self.sequence else 1, "the processes that share it"),
            *((BLOCKS.get(recipe, 1), f"the block of {recipe}") for recipe in options.recipes),
        ):
            if rows % count:
                of, do = "--batch times --seq-len of a microbatch", "give another size or number of microbatches"
                raise ArgumentError(expected(f"a multiple of {count}, {what}", of=of, got=rows, do=do))


class Ranks:
    """The processes of one command, of which this is the ``rank``-th. One alone sends nothing."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.layout = Layout()
        self._mesh: DeviceMesh | None = None
        self._store: Any = None
        self._at = "the start"

    @property
    def met(self) -> bool:
        """Whether this process knows the others."""
        return self.world > 1 and dist.is_initialized()

    @property
    def first(self) -> bool:
        """Whether this is the process that prints and saves."""
        return self.rank == 0

    @property
    def mesh(self) -> DeviceMesh | None:
        """The processes as a mesh, once they have met; None for one alone."""
        return self._mesh

    def begin(self, layout: Layout, facts: Mapping[str, str], silence: timedelta | None = None) -> None:
        """Meet the others, of whom none may be silent for longer than ``silence`` (30 seconds) from then on. ``facts``: what every process must have
        alike, by name, each as a text that can be shown. Raises ``ArgumentError``, in every process, where one has others than the first: training
        would mix two runs. Raises ``ExecutionError`` where they do not meet."""
        self.layout = layout
        if self.world == 1:
            return
        try:
            self._store, _, _ = next(rendezvous("env://", timeout=_TIMEOUT))
        except (RuntimeError, ValueError) as error:
            wanted, of, do = f"to meet the other {self.world - 1} of {self.world}", f"rank {self.rank}", "start all ranks by torchrun"
            raise ExecutionError(expected(wanted, of=of, got=_first_sentence(error), do=do)) from error
        self.reached(self._at)
        end_in_order()
        silence = silence or _TIMEOUT
        dist.init_process_group("gloo", store=self._store, rank=self.rank, world_size=self.world, timeout=silence)
        self._check_agreed(facts)
        copies, shards = (1, layout.data) if layout.shard else (layout.data, 1)
        sizes = {"pp": layout.stages, "dp_replicate": copies, "dp_shard": shards, "cp": layout.context}
        sizes |= {"ep": layout.experts, "tp": layout.tensor}
        # Groups of some of the processes would wait for half an hour. torch's stub describes another class.
        options = dist.ProcessGroupGloo.Options("gloo", silence)  # pyright: ignore[reportCallIssue]
        within: dict[int | str, Any] = dict.fromkeys(sizes, options)
        self._mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=within)

    def _check_agreed(self, facts: Mapping[str, str]) -> None:
        of_all = tex.prim.all_gather(torch.stack([_fingerprint(value) for value in facts.values()])[None])
        for rank, differs in enumerate((of_all != of_all[:1]).any(2).tolist()):
            names = [name for name, other in zip(facts, differs, strict=True) if other]
            if names:
                shown = f" (rank {self.rank} has {', '.join(f'{name} {facts[name]}' for name in names)})"
                do = "start all ranks by one command, on one version"
                raise ArgumentError(expected("what rank 0 has", of=f"rank {rank}", got=f"another {', another '.join(names)}{shown}", do=do))

    def reached(self, place: str) -> None:
        """Tell the others where this process is, for what they say should it not answer."""
        self._at = place
        if self._store is not None:
            self._store.set(f"at/{self.rank}", place)

    def lost(self, error: RuntimeError) -> ExecutionError | None:
        """What to say of an error of the group: whom this process waited for, and where that one was last; None for an error of another kind. Those
        that wait, too, say so."""
        if self._store is None or not any(word in str(error).lower() for word in _OF_THE_GROUP):
            return None
        try:
            self._store.set(f"waits/{self.rank}", "")
            time.sleep(_OTHERS_NOTICE)
            silent = [rank for rank in range(self.world) if not self._store.check([f"waits/{rank}"])]
            seen = [f"rank {rank}, which {self._last_place(rank)}" for rank in silent]
        except RuntimeError:  # the store goes with the process, or the launcher, that has it
            seen = []
        do = "see what it said before, and go on from the last checkpoint by --resume"
        wanted, of = "every process to answer", f"rank {self.rank} at {self._at}"
        return ExecutionError(expected(wanted, of=of, got=f"nothing from {' and '.join(seen) or 'another'} ({_first_sentence(error)})", do=do))

    def _last_place(self, rank: int) -> str:
        place = f"at/{rank}"
        return f"was last at {self._store.get(place).decode()}" if self._store.check([place]) else "has not come"

    @contextmanager
    def telling(self) -> Iterator[None]:
        """For what the first process does while the others wait, say saving. Where the system refuses it, all raise so: ``FileError`` with what the
        first says. The others would wait for it otherwise."""
        failed: Exception | None = None
        try:
            yield
        except (FusibleError, OSError) as error:
            failed = error
        said = self._from_first("" if failed is None else str(failed))
        if failed is not None:
            raise failed
        if said:
            raise FileError(f"as rank 0 says, {said}")

    def _from_first(self, text: str) -> str:
        """A text of the first process, in every one."""
        nbytes = self.largest(len(text.encode()))
        if self.world == 1 or not nbytes:
            return text
        content = torch.frombuffer(bytearray(text.encode().ljust(nbytes)), dtype=torch.uint8)
        dist.broadcast(content, 0)
        return bytes(content.tolist()).decode().rstrip()

    def end(self) -> None:
        """Part from the others."""
        if self.met:
            dist.destroy_process_group()

    def own(self, *windows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """This process's part of windows ``[batch, bytes]``."""
        return windows if self._mesh is None else local_batch(self._mesh, *windows)

    def own_bytes(self, *windows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same of windows that every process sees, but for the parts of each that it shares out."""
        return windows if self._mesh is None else local_batch(self._mesh["cp"], *windows)

    def lay_out(self, model: ByteGPT) -> tuple[Stage, Schedule]:
        """Lay the model out on the processes: what this one has of it, and how a step goes through all of it."""
        mesh, layout = self._mesh, self.layout
        if mesh is None:
            return model, AtOnce(model, model, cross_entropy)
        place = mesh.get_local_rank("pp")
        stage = stages_of(model, layout.stages)[place] if layout.stages > 1 else model
        parallelize(stage, mesh, sequence_parallel=layout.sequence, shared_output=True, context_parallel=layout.way)
        loss: Loss = CrossEntropyLoss(group=mesh["tp"].get_group()) if layout.tensor > 1 else cross_entropy
        called = self._replicated(stage, mesh)
        if layout.stages == 1:
            return stage, AtOnce(stage, called, loss)
        return stage, InStages(stage, called, loss, place, layout.microbatches, mesh["pp"].get_group())

    def _replicated(self, model: Stage, mesh: DeviceMesh) -> nn.Module:
        """What is called in the model's place, where other processes have other parts of the batch."""
        layout = self.layout
        if layout.data * layout.context == 1:
            return model
        if not layout.shard and layout.tensor * layout.experts == 1:
            group = mesh["dp_replicate", "cp"]._flatten().get_group()
            return nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        if layout.shard and gathers_quantized(model, model.recipe):
            gather_quantized(model, model.recipe)
        # DDP takes no DTensors: copies of the model are then shards of one process each.
        fully_shard(model, mesh=mesh["dp_shard", "cp"]._flatten() if layout.shard else mesh["dp_replicate", "cp"])
        return model

    def whole(self, model: Stage, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """By the names of the model in one process what all have of ``tensors``, by the names of ``model`` as it is laid out."""
        own = gather_tensors(model, tensors)
        return own if self.layout.stages == 1 else gather_stages(model, own, self._stages)

    def clip(self, parameters: Iterable[torch.Tensor], largest: float) -> None:
        """Scale the gradients so that their norm, over all stages, is at most ``largest``."""
        listed = list(parameters)
        norm = torch.nn.utils.get_total_norm([p.grad for p in listed if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.layout.stages > 1:
            squares = norm.square()
            dist.all_reduce(squares, group=self._stages)
            norm = squares.sqrt()
        torch.nn.utils.clip_grads_with_norm_(listed, largest, norm)

    @property
    def _stages(self) -> Any:
        """The processes that have the other stages of this one's model."""
        assert self._mesh is not None
        return self._mesh["pp"].get_group()

    def each(self, value: float) -> list[float]:
        """What each process has."""
        if self.world == 1:
            return [value]
        return tex.prim.all_gather(torch.tensor([value], dtype=torch.float64, device="cpu")).tolist()

    def texts(self, own: str) -> list[str]:
        """The text of each process."""
        return [own] if self.world == 1 else [content.decode() for content in gather_bytes(own.encode(), None)]

    def mean(self, values: Sequence[float]) -> list[float]:
        """The means over all processes."""
        if self.world == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64, device="cpu")
        dist.all_reduce(sums)
        return (sums / self.world).tolist()

    def any(self, flag: bool) -> bool:
        """Whether it is true in any process."""
        return self.mean([float(flag)])[0] > 0

    def largest(self, number: int) -> int:
        """The largest of all processes'."""
        if self.world == 1:
            return number
        found = torch.tensor(number, device="cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)


ALONE = Ranks(0, 1)
"""This process by itself."""


def together(job: Callable[[Ranks], int]) -> int:
    """``job`` by the processes that were launched, each of which calls it; the exit code. An error of one that is not the first names it, and one of
    the group says whom it waited for."""
    ranks = launched()
    try:
        return job(ranks)
    except FusibleError as error:
        if ranks.first:
            raise
        raise type(error)(f"rank {ranks.rank}: {error}") from error
    except RuntimeError as error:
        lost = ranks.lost(error)
        if lost is None:
            raise
        raise lost from error
    finally:
        ranks.end()


def _first_sentence(error: Exception) -> str:
    """Of torch's errors the sentence that says what happened, without the places in its source."""
    return re.split(r"\.(?:\s|$)", re.sub(r"^\[.*?\]\s*", "", str(error).strip().splitlines()[0]))[0]


def _fingerprint(text: str) -> torch.Tensor:
    """uint8 ``[32]``: the SHA-256 of a text."""
    return torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)


def launched() -> Ranks:
    """The processes that ``torchrun`` has started, or this one alone."""
    return Ranks(RANK.get(), WORLD_SIZE.get())
