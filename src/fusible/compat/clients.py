"""What frameworks need answered to take the host for the device that they train on, where no answer of torch's can say it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from fusible.compat.device_map.mode import is_in_force
from fusible.compat.finder import Around

__all__ = ["CLIENTS"]


@contextmanager
def _around_lightning(module: ModuleType) -> Iterator[None]:
    """Lightning's accelerator for CUDA refuses a device whose type is another; within the map every device is the host."""
    yield
    accelerator: Any = vars(module)["CUDAAccelerator"]
    former = getattr(accelerator.setup_device, "__wrapped__", accelerator.setup_device)  # of one that was loaded before, and adapted then

    def setup_device(self: Any, device: torch.device) -> None:
        if not is_in_force():
            former(self, device)

    setup_device.__wrapped__ = former  # type: ignore[attr-defined]
    accelerator.setup_device = setup_device


CLIENTS: dict[str, Around] = {
    "lightning.fabric.accelerators.cuda": _around_lightning,
    "lightning.pytorch.accelerators.cuda": _around_lightning,
    "lightning_fabric.accelerators.cuda": _around_lightning,
    "pytorch_lightning.accelerators.cuda": _around_lightning,
}
"""By the module's name, under both names of the package: what is done around its code."""
