"""What frameworks need answered to take the host for the device that they train on, where no answer of torch's can say it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from fusible.compat.device_map.mode import is_in_force
from fusible.compat.finder import Around
from fusible.compat.nvidia_state import read_state

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


@contextmanager
def _around_megatron(module: ModuleType) -> Iterator[None]:
    """Megatron-core takes the extra state of grouped layers apart by itself, as a pickle: it is read by what reads NVIDIA's."""
    yield
    vars(module)["pickle"] = SimpleNamespace(dumps=pickle.dumps, loads=read_state)


CLIENTS: dict[str, Around] = {
    "megatron.core.extensions.transformer_engine": _around_megatron,
    "lightning.fabric.accelerators.cuda": _around_lightning,
    "lightning.pytorch.accelerators.cuda": _around_lightning,
    "lightning_fabric.accelerators.cuda": _around_lightning,
    "pytorch_lightning.accelerators.cuda": _around_lightning,
}
"""By the module's name, under both names of the package: what is done around its code."""
