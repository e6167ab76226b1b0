"""Where mixtures of experts lie in a list of ops."""

from __future__ import annotations

from collections.abc import Sequence

from fusible.ops import CombineTokens, DispatchTokens, GroupedMMT, Op

__all__ = ["of_mixtures"]


def of_mixtures(ops: Sequence[Op]) -> list[bool]:
    """Of each op whether it dispatches tokens to experts, multiplies with those, or combines what they make. Its rows are not the tokens', yet what a
    mixture makes of a token hangs on that token alone: processes can share tokens out, each with a mixture of its own."""
    found: list[bool] = []
    inside = False
    for op in ops:
        inside = inside or isinstance(op, DispatchTokens)
        found.append(inside and isinstance(op, DispatchTokens | GroupedMMT | CombineTokens))
        inside = inside and not isinstance(op, CombineTokens)
    return found
