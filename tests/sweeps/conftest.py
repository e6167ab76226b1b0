"""One process as a group of processes, for collectives."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    hook = sys.excepthook  # which torch exchanges, so that errors show the rank
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
    sys.excepthook = hook
