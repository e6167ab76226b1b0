"""The padded shapes of MXFP8's and NVFP4's scale matrices, and the shapes of a grouped tensor's members."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["member_shapes", "scale_shape"]


def _padded(size: int, block: int, multiple: int) -> int:
    return -(-size // (block * multiple)) * multiple


def scale_shape(shape: Sequence[int], nvfp4: bool, columnwise: bool) -> tuple[int, int]:
    """Of a tensor that flattens to ``[M, K]``: one scale for 32 (MXFP8) or 16 (NVFP4) elements of a row, or of a column where ``columnwise``, padded
    to 128 vectors and 4 blocks. Column-wise scales of NVFP4 are transposed, ``[vectors, blocks]``."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    block = 16 if nvfp4 else 32
    vectors, length = (columns, rows) if columnwise else (rows, columns)
    padded, blocks = _padded(vectors, 1, 128), _padded(length, block, 4)
    return (blocks, padded) if columnwise and not nvfp4 else (padded, blocks)


def member_shapes(tensor: Any) -> list[tuple[int, ...]]:
    """The shape of each member of a grouped tensor; from its dimensions on the device, which waits for it, where no list of them is held."""
    if tensor.tensor_shapes:
        return [tuple(shape) for shape in tensor.tensor_shapes]
    rows, columns = tensor.logical_shape
    count = tensor.num_tensors
    lasts = tensor.last_dims.tolist() if tensor.last_dims is not None else [columns] * count
    common = rows // count if tensor.last_dims is None and count else rows
    firsts = tensor.first_dims.tolist() if tensor.first_dims is not None else [common] * count
    return list(zip(firsts, lasts, strict=True))
