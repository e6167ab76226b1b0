"""Patches of frameworks that refuse the host as the device to train on, where no answer of torch's could persuade them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from fusible.compat.device_map.mode import CPU, is_in_force
from fusible.compat.device_map.places import with_arguments
from fusible.compat.finder import Patch

__all__ = ["CLIENTS"]


@contextmanager
def _patch_lightning(module: ModuleType) -> Iterator[None]:
    """Lightning's accelerator for CUDA refuses a device whose type is another; within the map every device is the host."""
    yield
    accelerator: Any = vars(module)["CUDAAccelerator"]
    former = getattr(accelerator.setup_device, "__wrapped__", accelerator.setup_device)  # of one that was loaded before, and adapted then

    def setup_device(self: Any, device: torch.device) -> None:
        if not is_in_force():
            former(self, device)

    setup_device.__wrapped__ = former  # type: ignore[attr-defined]
    accelerator.setup_device = setup_device


@contextmanager
def _patch_sharding(module: ModuleType) -> Iterator[None]:
    """The first FSDP of torch looks for a device that is not the CPU, unless it is told of one. Its module is slow to import: not unasked."""
    yield
    sharded: Any = vars(module)["FullyShardedDataParallel"]
    former = getattr(sharded.__init__, "__wrapped__", sharded.__init__)  # of one that was loaded before, and adapted then

    def take_host(given: dict[str, Any]) -> None:
        if is_in_force():
            given["device_id"] = CPU

    sharded.__init__ = with_arguments(former, take_host)


CLIENTS: dict[str, Patch] = {
    "lightning.fabric.accelerators.cuda": _patch_lightning,
    "lightning.pytorch.accelerators.cuda": _patch_lightning,
    "lightning_fabric.accelerators.cuda": _patch_lightning,
    "pytorch_lightning.accelerators.cuda": _patch_lightning,
    "torch.distributed.fsdp.fully_sharded_data_parallel": _patch_sharding,
}
"""By the module's name, under each name of its package: what is done around its code."""
