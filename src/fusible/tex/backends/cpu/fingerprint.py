"""Whether tensors still hold the bytes that they held: fingerprints, taken at the speed of memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusible import cpp_extensions as native

__all__ = ["fingerprints"]


def fingerprints(tensors: Sequence[Tensor]) -> list[tuple[int, int]] | None:
    """A 128-bit fingerprint of the values of each tensor in host memory, in the order of its indices; None where there are no native kernels.

    If one value changes, the fingerprint surely changes; if several do, it changes but for a chance of at most 2^-32. Shape, strides and dtype do not
    count. A tensor that is not contiguous is copied first.
    """
    if not native.available:
        return None
    return native.fingerprints([x if x.is_contiguous() and not x.is_neg() else x.detach().contiguous().resolve_neg() for x in tensors])
