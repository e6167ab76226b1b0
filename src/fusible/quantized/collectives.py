"""Quantized tensors in torch.distributed's own collectives: those under delayed scaling travel as they are held, others as values."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from fusible.quantized.storage import note_written

__all__ = ["by_bytes", "finished", "is_collective", "sent", "share_first_scale"]

_ALIKE = ("broadcast_", "allgather_")
"""The collectives to which each process gives tensors of the same kind. To a scatter or a gather one process gives more than the others."""


def is_collective(func: Any) -> bool:
    """Whether ``func`` is a collective that writes to its first argument, of which its schema says nothing."""
    return func.namespace == "c10d" and _name(func).endswith("_")


def by_bytes(func: Any, args: Any) -> bool:
    """Whether a collective copies tensors whose values another process would quantize otherwise, as its scale is not theirs. A vector is sent by its
    values: such are the views of weights that torch sends many in one message. So is a part, whose scale is that of its whole."""
    if func.namespace != "c10d" or _name(func) not in _ALIKE:
        return False
    tensors: list[Any] = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
    return all(len(x.shape) > 1 and _has_scale(getattr(x, "_quantizer", None)) and x._part is None for x in tensors)


def sent(func: Any, args: Any, kwargs: Any) -> Any:
    """Copy the bytes, what they are read by, and the scale and amax that the quantizers go on from: a message each."""
    tensors: dict[int, Any] = {id(x): x for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
    rows = {key: x._data if x._data is not None else x._transpose.movedim(0, -1).contiguous() for key, x in tensors.items()}
    parts = {key: (rows[key], x._scale_inv, x._quantizer.scale, x._quantizer.amax) for key, x in tensors.items()}
    result: Any = None
    for i in range(4):
        result = func(*tree_map(lambda x, i=i: parts[id(x)][i] if id(x) in parts else x, args), **kwargs)
        finished(result)
    for x in tree_leaves(args[0]):
        if x._transpose is not None:  # in its memory, which other tensors may share
            x._transpose.copy_(rows[id(x)].movedim(-1, 0))
            x._transpose_invalid = False
        note_written(x)
    return args[0], result[1]


def finished(result: Any) -> None:
    """Wait until a collective has written its tensors."""
    for work in tree_leaves(result):
        if isinstance(work, torch.ScriptObject):
            torch.distributed.Work.unbox(work).wait()


def share_first_scale(x: Any, group: Any) -> None:
    """Give the shard ``x`` of a weight the scale that the largest magnitude in all processes of ``group`` gives, where one has been written with a
    scale of its own since they were made. No iteration has observed the weight, in any process."""
    quantizer = x._quantizer
    first = quantizer.first_scale
    scale, amax = quantizer.scale.view(1), quantizer.amax.view(1)
    own = torch.full_like(amax, float(first.fitted))
    said = torch.cat([amax, torch.maximum(own, (x._scale_inv != scale.reciprocal()).to(amax.dtype))])  # a part may have been written, too
    torch.distributed.all_reduce(said, op=torch.distributed.ReduceOp.MAX, group=group)
    if not said[1]:
        return
    former = x._scale_inv.clone()
    first.fit(quantizer, said[:1])
    if not torch.equal(former, quantizer.scale.view(1).reciprocal()):
        first.observed = True  # the scale is given
        x.quantize_(x.dequantize(dtype=torch.float32))
        first.observed = False
    quantizer.amax.copy_(said[:1].view_as(quantizer.amax))
    first.fitted = False


def _name(func: Any) -> str:
    return func._schema.name.rpartition("::")[2]  # type: ignore[no-any-return]


def _has_scale(quantizer: Any) -> bool:
    return isinstance(getattr(quantizer, "scale", None), torch.Tensor) and isinstance(getattr(quantizer, "amax", None), torch.Tensor)
