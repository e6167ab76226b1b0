"""Which part of a batch a process has."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from fusible.distributed.mesh import size_of
from fusible.errors import ShapeError, expected

__all__ = ["local_batch"]

_OF_BATCHES = ("dp_replicate", "dp_shard", "ep")


def local_batch(mesh: DeviceMesh, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of each of ``tensors [batch, tokens, *]`` the part of this process: of the batch along ``dp_replicate``, ``dp_shard`` and ``ep``; of the
    tokens, along ``cp`` of n processes, the r-th and the r-th last of ``2 n`` equal parts; the same along the other dimensions. Raises ``ShapeError``
    where these cannot be shared out equally."""
    count, part = 1, 0
    for name in _OF_BATCHES:
        count, part = count * size_of(mesh, name), part * size_of(mesh, name) + _rank_in(mesh, name)
    processes, rank = size_of(mesh, "cp"), _rank_in(mesh, "cp")
    for x in tensors:
        for dim, what, of in ((0, "batch", count), (1, "tokens", 2 * processes if processes > 1 else 1)):
            if of > 1 and (x.ndim <= dim or x.shape[dim] % of):
                wanted, do = f"a multiple of {of} for its {what}", "give a batch that the processes can share out equally"
                raise ShapeError(expected(wanted, of="a tensor of local_batch", got=list(x.shape), do=do))
    own = tuple(x.chunk(count)[part] if count > 1 else x for x in tensors)
    return tuple(_halves(x, rank, processes) for x in own) if processes > 1 else own


def _halves(x: torch.Tensor, rank: int, processes: int) -> torch.Tensor:
    parts = x.chunk(2 * processes, 1)
    return torch.cat([parts[rank], parts[-1 - rank]], 1)


def _rank_in(mesh: DeviceMesh, name: str) -> int:
    return mesh.get_local_rank(name) if name in (mesh.mesh_dim_names or ()) else 0
