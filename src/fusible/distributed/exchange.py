"""What the processes of a group tell one another, as bytes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["gather_bytes"]


def gather_bytes(content: bytes, group: Any, device: torch.device | str = "cpu") -> list[bytes]:
    """The ``content`` of each process of ``group``, in order; each gets all. ``device``: where the group's backend takes tensors."""
    found: list[bytes] = []
    for rank in range(dist.get_world_size(group)):
        size = torch.tensor([len(content)], device=device)
        dist.broadcast(size, group=group, group_src=rank)
        sent = torch.empty(int(size), dtype=torch.uint8, device=device)
        if rank == dist.get_rank(group) and content:
            sent.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(sent, group=group, group_src=rank)
        found.append(sent.cpu().numpy().tobytes())
    return found
