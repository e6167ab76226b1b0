"""Checkpoints by ``torch.distributed.checkpoint``, as safetensors: each process writes what it has, and reads what it needs.

Tensors are saved by the names that they have in one process. What is held in parts there, such as query, key and value, is one tensor of which each
process has pieces; so what one layout has saved any other loads, one process included, and none ever has all of it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future, wait_all

from fusible.distributed.whole import divisions, with_states_of_all
from fusible.errors import CheckpointError, ExecutionError, NotServedError, expected
from fusible.files import refused
from fusible.pytorch.checkpoint import LoadPlanner
from fusible.pytorch.engine.shares import local_of
from fusible.quantized import QuantizedTensor

__all__ = ["load_sharded", "save_sharded"]

Tensors = Mapping[str, torch.Tensor]


def save_sharded(folder: str | Path, model: nn.Module, tensors: Tensors, moments: Mapping[str, Tensors] | None = None) -> list[str]:
    """Save ``tensors`` into ``folder``, each process what it has, as safetensors; give back the names of the files that this process wrote.

    ``tensors``: by the names of ``model`` as it is laid out, say ``model.state_dict()``; ``moments``: those of an optimizer, by their kinds and then
    by the same names; saved as ``NAME.KIND``. What several processes have alike, one writes. The folder is one that all see, and should be empty.
    ``HuggingFaceStorageReader`` of ``torch.distributed.checkpoint`` reads it too.

    Every process of the model calls it. Raises ``FileError`` where the system refuses it to one, in all, and ``NotServedError`` for parameters in 8
    bits.
    """
    writer = _Writer(str(folder), save_distributed=True)
    with _telling(f"a shard in {Path(folder).absolute()}"):
        save(
            _as_whole(model, with_states_of_all(model, tensors), moments), storage_writer=writer, planner=DefaultSavePlanner(flatten_state_dict=False)
        )
    return sorted(writer.written)


def load_sharded(folder: str | Path, model: nn.Module, tensors: dict[str, torch.Tensor], moments: Mapping[str, Tensors] | None = None) -> None:
    """Read what ``save_sharded`` wrote on any processes into ``tensors`` and ``moments``, which are as there; each process reads what it needs.

    Then ``model.load_state_dict(tensors)``: ``tensors`` gets the scaling states of the checkpoint too, which the model may not have yet. A folder of
    safetensors that one process wrote is read as well. Every process of the model calls it. Raises ``CheckpointError`` in all of them where a tensor
    is missing or has another shape, before anything is read.
    """
    reader = HuggingFaceStorageReader(str(folder))
    with _telling(f"the shards in {Path(folder).absolute()}"):
        wanted = _as_whole(model, tensors, moments)
        _check_complete(folder, reader, wanted)
        load(wanted, storage_reader=reader, planner=LoadPlanner(tensors, flatten_state_dict=False))


def _as_whole(model: nn.Module, tensors: Tensors, moments: Mapping[str, Tensors] | None) -> dict[str, Any]:
    """Tensors for ``torch.distributed.checkpoint``, by the names of the model in one process; they share the memory of what is given."""
    quantized = next((f"{name} as a {kind.__name__}" for name, x in tensors.items() if issubclass(kind := type(local_of(x)), QuantizedTensor)), None)
    if quantized is not None:
        do = "save and load before quantize_parameters, or by torch.distributed.checkpoint"
        raise NotServedError(expected("tensors in high precision", of="the shards of a model", got=quantized, do=do))
    kinds = {"": dict(tensors), **{f".{kind}": dict(of_kind) for kind, of_kind in (moments or {}).items()}}
    for found in kinds.values():
        for whole, parts in divisions(model).items():
            if parts[0] in found:
                found[whole] = _joined([found.pop(part) for part in parts])
    return {f"{name}{kind}": tensor.detach() if type(tensor) is not _InPieces else tensor for kind, f in kinds.items() for name, tensor in f.items()}


class _Piece(NamedTuple):
    """What this process has of a whole tensor, and where it begins."""

    offset: torch.Size
    values: torch.Tensor


class _InPieces(torch.Tensor):
    """A whole tensor of which this process has ``pieces``. Its dunder methods are torch's protocol for what a checkpoint takes in pieces."""

    pieces: Sequence[_Piece]

    @staticmethod
    def __new__(cls, size: torch.Size, pieces: Sequence[_Piece], like: torch.Tensor) -> _InPieces:
        made = torch.Tensor._make_wrapper_subclass(cls, size, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
        made.pieces = pieces
        return made

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        chunks = zip(self.__create_chunk_list__(), self.pieces, strict=True)
        data = [TensorWriteData(chunk, TensorProperties.create_from_tensor(piece.values), self.size()) for chunk, piece in chunks]
        return [WriteItem(MetadataIndex(fqn, each.chunk.offsets), WriteItemType.SHARD, tensor_data=each) for each in data]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(piece.offset, piece.values.size()) for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(piece.values for piece in self.pieces if piece.offset == index.offset)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        do = "use gather_tensors for the values"
        raise NotServedError(expected("to be saved or loaded", of="a tensor in pieces", got=f"a call of {func}", do=do))


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``parts`` of the whole, one after another along the first dimension; of numbers the first."""
    if not parts[0].ndim:
        return parts[0]
    pieces: list[_Piece] = []
    first = 0
    for part in parts:
        pieces += _pieces(part.detach(), first)
        first += part.shape[0]
    return _InPieces(torch.Size((first, *parts[0].shape[1:])), pieces, parts[0])


def _pieces(part: torch.Tensor, first: int) -> Iterator[_Piece]:
    """What this process has of ``part``, which begins at the row ``first`` of the whole."""
    local, offset = part, torch.Size([0] * part.ndim)
    if isinstance(part, DTensor):
        (chunk,) = part.__create_chunk_list__()
        local, offset = part.to_local(), chunk.offsets
    if local.numel():
        yield _Piece(torch.Size((first + offset[0], *offset[1:])), local)


class _Writer(HuggingFaceStorageWriter):
    """torch's writer gives a file one piece of a name, so that others of it are lost: here each goes to a file of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.written: set[str] = set()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data={**plan.storage_data, "processes": len(plans)}) for plan in super().prepare_global_plan(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        about = dict(plan.storage_data)
        processes = about.pop("processes")
        written: list[Future[list[WriteResult]]] = []
        for number, items in enumerate(_distinct(plan.items)):
            of_file = {**about, "shard_index": about["shard_index"] + number * processes}
            written.append(super().write_data(replace(plan, items=items, storage_data=of_file), planner))
        results = [result for of_file in wait_all(written) for result in of_file]
        self.written |= {result.storage_data.relative_path for result in results}
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _distinct(items: Iterable[WriteItem]) -> list[list[WriteItem]]:
    """``items`` in lists of which each has every name once at most."""
    lists: dict[int, list[WriteItem]] = defaultdict(list)
    seen: Counter[str] = Counter()
    for item in items:
        lists[seen[item.index.fqn]].append(item)
        seen[item.index.fqn] += 1
    return list(lists.values())


def _check_complete(folder: str | Path, reader: HuggingFaceStorageReader, wanted: Mapping[str, Any]) -> None:
    """Raise ``CheckpointError`` unless the files have all of every tensor: torch leaves what they lack as it was."""
    found = reader.read_metadata().state_dict_metadata
    for name, tensor in wanted.items():
        saved = found.get(name)
        do = "load what was saved of this model"
        if not isinstance(saved, TensorStorageMetadata):
            raise CheckpointError(expected(f"the tensor {name}", of=f"the shards in {folder}", got="none", do=do))
        if saved.size != tensor.size():
            raise CheckpointError(expected(f"{list(tensor.size())}", of=f"{name} in {folder}", got=list(saved.size), do=do))
        missing = math.prod(saved.size) - sum(math.prod(chunk.sizes) for chunk in saved.chunks)
        if missing:
            raise CheckpointError(expected("all of it", of=f"{name} in {folder}", got=f"{missing} elements less", do="use a whole checkpoint"))


@contextmanager
def _telling(of: str) -> Iterator[None]:
    """Turn torch's exception of all processes into that of the first that failed, in each."""
    try:
        yield
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items(), key=lambda failure: failure[0])
        if isinstance(error, OSError):
            told: Exception = refused(error, of)
        else:
            told = ExecutionError(expected("to be saved or loaded", of=of, got=f"{type(error).__name__} ({error})", do="see what it says"))
        if dist.is_initialized() and rank != dist.get_rank():
            told = type(told)(f"as rank {rank} says, {told}")
        raise told from error
