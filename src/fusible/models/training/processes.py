"""``Processes``: who shares the work of a ``Trainer``, and what they tell one another in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fusible.distributed import gather_quantized, gathers_quantized, parallelize
from fusible.distributed.mesh import size_of
from fusible.errors import ArgumentError, expected
from fusible.models.language_model import LanguageModel
from fusible.models.training.packing import IGNORED
from fusible.pytorch import CrossEntropyLoss

__all__ = ["Processes"]

_OF_WINDOWS = ("dp_replicate", "dp_shard", "ep")
"""The dimensions along which each process has windows of its own."""


class Processes:
    """The processes of ``mesh``, whose dimensions have the names that ``parallelize`` takes; without one this process alone, which sends nothing.

    Along ``dp_replicate`` each has its part of a step's windows and all of the model; along ``dp_shard`` they share out parameters, gradients and
    moments as well (FSDP); along ``ep`` the experts; along ``tp`` the columns of products, and with ``sequence_parallel`` the rows of everything
    else. Whatever the mesh, a step is that of one process, but for the order of sums.
    """

    def __init__(self, mesh: DeviceMesh | None = None, *, sequence_parallel: bool = False) -> None:
        self._mesh, self._sequence_parallel = mesh, sequence_parallel
        self._device = "cpu" if mesh is None else mesh.device_type
        self._size = {name: 1 if mesh is None else size_of(mesh, name) for name in (*_OF_WINDOWS, "tp")}
        self.parts, self._part = 1, 0
        """How many processes have windows of their own, and the how manieth this one is."""
        for name in _OF_WINDOWS:
            rank = mesh.get_local_rank(name) if mesh is not None and self._size[name] > 1 else 0
            self.parts, self._part = self.parts * self._size[name], self._part * self._size[name] + rank
        self._with_windows = self._group(*_OF_WINDOWS) if self.parts > 1 else None

    @property
    def divided(self) -> bool:
        """Whether this process has parts of the model alone."""
        return any(size > 1 for name, size in self._size.items() if name != "dp_replicate")

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """In what gradients are summed; None where FSDP does it, which gives them in the dtype of the parameters in the end."""
        return None if self._size["dp_shard"] > 1 else torch.float32

    def lay_out(self, model: LanguageModel) -> CrossEntropyLoss:
        """Lay ``model`` out, and give back the sum of its tokens' losses. Raises ``FusibleError`` where it cannot be, in every process alike."""
        if self._mesh is None:
            return CrossEntropyLoss(ignore_index=IGNORED, reduction="sum")
        parallelize(model, self._mesh, sequence_parallel=self._sequence_parallel, shared_output=True)
        if self._size["dp_shard"] > 1:
            if model.recipe is not None and gathers_quantized(model, model.recipe):
                gather_quantized(model, model.recipe)
            # Sums over micro-batches and processes in fp32.
            fully_shard(model, mesh=self._mesh["dp_shard"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        group = self._mesh["tp"].get_group() if self._size["tp"] > 1 else None
        return CrossEntropyLoss(ignore_index=IGNORED, reduction="sum", group=group)

    def check(self, batch: int) -> None:
        """Raise ``ArgumentError`` for a step of so many windows that they cannot be shared out equally: processes would wait for one another."""
        if batch % self.parts:
            wanted = f"a multiple of the {self.parts} processes that share it"
            raise ArgumentError(expected(wanted, of="batch of StepOptions", got=batch, do="choose another"))

    def own(self, places: torch.Tensor) -> torch.Tensor:
        """Of a step's windows those of this process."""
        return places.chunk(self.parts)[self._part]

    def rounds(self, count: int, at_once: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """All of ``count`` windows in as many batches for each process: this one's places, and which of them count: of several processes each has
        ``at_once`` in every batch, for they wait for one another."""
        for begin in range(0, count, at_once * self.parts):
            places = begin + self._part * at_once + torch.arange(at_once, device="cpu")
            counted = places < count
            yield (places[counted], counted[counted]) if self.parts == 1 else (places.where(counted, 0), counted)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What is differentiated, where gradients are to be sums over all processes: backward makes means of some."""
        meaned = self._size["dp_shard"] * self._size["ep"]
        return loss * meaned if meaned > 1 else loss

    def last_of(self, model: LanguageModel, batches: Sequence[Any]) -> Iterator[Any]:
        """``batches``; where processes share out parameters they exchange gradients in backward of the last one alone."""
        for number, batch in enumerate(batches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(number == len(batches) - 1)
            yield batch

    def sums(self, *values: float) -> list[float]:
        """The sums over all parts of a batch."""
        if self.parts == 1:
            return list(values)
        found = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(found, group=self._with_windows)
        return found.tolist()

    def add_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make the gradients those of all windows, where backward has not."""
        if self._size["dp_replicate"] == 1:
            return
        group = self._group("dp_replicate")
        there = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8, device=self._device)
        dist.all_reduce(there, dist.ReduceOp.MAX, group)
        used = [parameter for parameter, flag in zip(parameters, there.tolist(), strict=True) if flag]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
        works: list[Any] = [dist.all_reduce(_local(parameter.grad), group=group, async_op=True) for parameter in used]
        for work in works:
            work.wait()

    def clip(self, parameters: Sequence[torch.Tensor], most: float) -> float:
        """Scale all gradients together to a norm of at most ``most``, and return what it was (Pascanu et al. 2013, arXiv:1211.5063)."""
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return norm.item()

    def _group(self, *names: str) -> Any:
        assert self._mesh is not None
        there = tuple(name for name in names if self._size[name] > 1)
        return self._mesh[there[0]].get_group() if len(there) == 1 else self._mesh[there]._flatten().get_group()


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
