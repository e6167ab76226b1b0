"""Loading into parameters that several processes share out among them (``DTensor``, FSDP2)."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

from fusible.files import parse_json

__all__ = ["share_states"]


def share_states(module: nn.Module, state_dict: dict[str, Any], prefix: str, kind: str) -> None:
    """Give every process the scaling states (keys below ``prefix`` with a part ``kind``) that any process of the mesh has in its ``state_dict``.

    ``set_model_state_dict`` with ``broadcast_from_rank0`` hands parameters on, and other tensors to the first process alone. The processes of a mesh
    load together, so they may talk here; nothing is done for a module whose parameters are not shared out.
    """
    # Whoever imports DTensor has it here; to import it for everyone costs half a second.
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    shared = next((p for p in module.parameters() if isinstance(p, dtensor)), None) if dtensor is not None else None
    if shared is None:
        return
    mesh: Any = shared.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
    for dimension in range(mesh.ndim):
        _share(state_dict, prefix, kind, mesh.get_group(dimension), shared.device)


def _share(state_dict: dict[str, Any], prefix: str, kind: str, group: Any, device: torch.device) -> None:
    distributed = torch.distributed
    mine = {key: len(value) for key, value in state_dict.items() if key.startswith(prefix) and kind in key.split(".") and _is_bytes(value)}
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(device)
    world = distributed.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    distributed.all_gather(lengths, torch.tensor([len(text)], device=device), group=group)
    longest = max(int(length) for length in lengths)
    texts = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    distributed.all_gather(texts, nn.functional.pad(text, (0, longest - len(text))), group=group)
    theirs = [parse_json(bytes(text[: int(length)].tolist()), of="what another process sent") for text, length in zip(texts, lengths, strict=True)]
    for key in sorted({key for sizes in theirs for key in sizes}):
        if all(key in sizes for sizes in theirs):
            continue
        first = next(rank for rank, sizes in enumerate(theirs) if key in sizes)
        value = state_dict[key].to(device) if key in mine else torch.empty(theirs[first][key], dtype=torch.uint8, device=device)
        distributed.broadcast(value, distributed.get_global_rank(group, first), group=group)
        state_dict.setdefault(key, value.cpu())


def _is_bytes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.uint8 and value.dim() == 1
