"""Whether tensors still hold the bytes that they held: fingerprints, taken at the speed of memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusible import cpp_extensions as native

__all__ = ["fingerprints"]


def fingerprints(tensors: Sequence[Tensor]) -> list[tuple[int, int]] | None:
    """128 bits for the values of each tensor of host memory, as they lie in the order of its indices; None where there are no native kernels.

    Another value anywhere gives others for certain, several values others but for a chance of 2^-32 at most. A tensor that is not contiguous is
    copied first. Shape, strides and dtype do not enter.
    """
    if not native.available:
        return None
    return native.fingerprints([x if x.is_contiguous() and not x.is_neg() else x.detach().contiguous().resolve_neg() for x in tensors])
