"""Patches of frameworks that refuse the host as the device to train on, where no answer of torch's could persuade them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from fusible.compat.device_map.mode import CPU, is_in_force
from fusible.compat.device_map.places import with_arguments
from fusible.compat.finder import Patch, after, replace

__all__ = ["CLIENTS"]


@after
def _patch_lightning(module: ModuleType) -> None:
    """Lightning's accelerator for CUDA refuses a device whose type is another; within the map every device is the host."""

    def unless_mapped(theirs: Callable[[Any, torch.device], None]) -> Callable[[Any, torch.device], None]:
        return lambda self, device: None if is_in_force() else theirs(self, device)

    replace(vars(module)["CUDAAccelerator"], "setup_device", unless_mapped)


@after
def _patch_sharding(module: ModuleType) -> None:
    """The first FSDP of torch looks for a device that is not the CPU, unless it is told of one. Its module is slow to import: not unasked."""

    def take_host(arguments: dict[str, Any]) -> None:
        if is_in_force():
            arguments["device_id"] = CPU

    replace(vars(module)["FullyShardedDataParallel"], "__init__", lambda theirs: with_arguments(theirs, take_host))


CLIENTS: dict[str, Patch] = {
    "lightning.fabric.accelerators.cuda": _patch_lightning,
    "lightning.pytorch.accelerators.cuda": _patch_lightning,
    "lightning_fabric.accelerators.cuda": _patch_lightning,
    "pytorch_lightning.accelerators.cuda": _patch_lightning,
    "torch.distributed.fsdp.fully_sharded_data_parallel": _patch_sharding,
}
"""By the module's name, under each name of its package: what is done around its code."""
