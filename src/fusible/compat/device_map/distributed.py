"""``torch.distributed`` of the mapped device: what is asked of NCCL is done by gloo, which serves the host's tensors."""

from __future__ import annotations

import atexit
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fusible.compat.device_map.mode import CPU, is_cuda
from fusible.compat.device_map.places import everywhere, loaded, with_arguments
from fusible.compat.device_map.requests import Requests
from fusible.ending import let_threads_end

__all__ = ["distributed_replacements"]


def _backend(name: Any) -> Any:
    """A backend as gloo where it is NCCL, for any or for a kind of device; and where none is named, since the host has one alone."""
    return "gloo" if name is None or (isinstance(name, str) and "nccl" in name.lower()) else name


def _take_gloo(arguments: dict[str, Any]) -> None:
    """Change the arguments of a function that makes process groups: to gloo, without NCCL's options and device."""
    arguments["backend"] = _backend(arguments.get("backend"))
    arguments.pop("device_id", None)
    if "NCCL" in type(arguments.get("pg_options")).__qualname__:
        del arguments["pg_options"]


def _ended_in_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which makes the first process group, so that what is left of the groups ends before Python does (``let_threads_end``). NCCL's
    clients need not destroy theirs."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        function(*args, **kwargs)
        atexit.unregister(_end_groups)
        atexit.register(_end_groups)

    return call


def _end_groups() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    let_threads_end()


def _take_host(arguments: dict[str, Any]) -> None:
    """Change the arguments of a function that makes a mesh: to the host's type of device."""
    if is_cuda(arguments.get("device_type")):
        arguments["device_type"] = CPU.type


def _take_no_device(arguments: dict[str, Any]) -> None:
    """Change the arguments of ``DistributedDataParallel``: to no device, as torch takes none beside parameters on the CPU."""
    arguments.update(device_ids=None, output_device=None)


def distributed_replacements() -> Iterator[tuple[Any, str, Any]]:
    """``(owner, name, value)`` of what is put in place, wherever torch holds it."""
    if not torch.distributed.is_available():
        return
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    meshes = importlib.import_module("torch.distributed.device_mesh")
    yield meshes.DeviceMesh, "__init__", with_arguments(meshes.DeviceMesh.__init__, _take_host)
    replicas = importlib.import_module("torch.nn.parallel").DistributedDataParallel
    yield replicas, "__init__", with_arguments(replicas.__init__, _take_no_device)
    values = {name: with_arguments(getattr(c10d, name), _take_gloo) for name in ("init_process_group", "new_group")}
    values["init_process_group"] = _ended_in_order(values["init_process_group"])
    values |= {"init_device_mesh": with_arguments(meshes.init_device_mesh, _take_host), "is_nccl_available": lambda: True}
    requests = Requests()
    values["_coalescing_manager"] = requests.coalescing(c10d._coalescing_manager, c10d._get_default_group)
    for name in ("send", "recv", "recv_anysource"):
        yield c10d.ProcessGroup, name, requests.kept(getattr(c10d.ProcessGroup, name))
    former = {name: getattr(c10d, name, None) or getattr(meshes, name) for name in values}
    modules = loaded("torch.distributed")
    for name, value in values.items():
        yield from everywhere(modules, former[name], name, value)
