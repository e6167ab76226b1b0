"""The dimensions of a mesh: torchtitan's names, of which each says how a model is laid out along it."""

from __future__ import annotations

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fusible.errors import ArgumentError, DTypeError, expected

__all__ = ["DIMENSIONS", "check_mesh", "size_of"]

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
"""Pipeline stages; copies of the model, each with other data; one copy shared out, each process with other data; parts of each sequence; experts;
columns."""


def check_mesh(mesh: DeviceMesh, served: tuple[str, ...]) -> None:
    """Raise ``DTypeError`` for what is no mesh; ``ArgumentError`` for one without names, with unknown ones, with one more than 1 process along a
    dimension that is not ``served``, or without this process."""
    of = "the mesh of parallelize"
    if not isinstance(mesh, DeviceMesh):
        do = "make one by torch.distributed.device_mesh.init_device_mesh"
        raise DTypeError(expected("a DeviceMesh", of=of, got=f"a {type(mesh).__name__}", do=do))
    names = mesh.mesh_dim_names
    do = f"name its dimensions, by some of {', '.join(DIMENSIONS)}"
    if not names:
        raise ArgumentError(expected("a name for each dimension", of=of, got="none", do=do))
    unknown = [name for name in names if name not in DIMENSIONS]
    if unknown:
        raise ArgumentError(expected("known dimensions", of=of, got=", ".join(map(repr, unknown)), do=do))
    beyond = [name for name in names if name not in served and size_of(mesh, name) > 1]
    if beyond:
        got = ", ".join(f"{name!r} of {size_of(mesh, name)}" for name in beyond)
        raise ArgumentError(expected(f"dimensions {', '.join(served)} alone", of=of, got=got, do="leave the others to PyTorch's own tools"))
    if mesh.get_coordinate() is None:
        raise ArgumentError(expected(f"a mesh with rank {dist.get_rank()}", of=of, got="one without", do="call parallelize in the mesh's processes"))


def size_of(mesh: DeviceMesh, name: str) -> int:
    """The number of processes along a dimension; 1 along one that the mesh has not."""
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(name)) if name in names else 1
