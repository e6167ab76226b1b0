"""``PassTensors``: what goes into a pass and what comes out of it, by what it is, and as the one list that executors take and give."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

__all__ = ["PassTensors", "Places", "Sizes", "pack", "places_of", "unpack"]

Group = TypeVar("Group")

Sizes = tuple[int, ...]
"""The number of tensors in each group, in the order of the fields of ``PassTensors``. A program keeps these, and no tensors."""


class PassTensors(NamedTuple, Generic[Group]):
    """The tensors of a pass in named groups, of which no pass has all; of torch, or of the framework that an executor records with.

    The record keeps every tensor alive. So a pass that uses its tensors up takes from it what it needs, and lets it go.
    """

    passing: Group
    """What passes a border: x or dy, and side values or their gradients. First, for executors tell shapes by the first tensor."""
    args: Group
    """The parameters."""
    saved: Group
    """What forward leaves for backward."""
    call_inputs: Group
    """The values of the whole call (sequences, a seed)."""
    grads: Group
    """The gradients of parameters: those that come out, and going in what they are added to."""
    caches: Group
    """Caches of keys and values: going in as they were, coming out with the new tokens."""
    scaling: Group
    """The scales that a pass quantizes by; coming out the amaxes that it saw."""


Places: TypeAlias = PassTensors[slice]
"""Where each group lies in the list: for results, of which a call takes few groups and takes them each time."""


def pack(
    passing: Sequence[Any] = (),
    args: Sequence[Any] = (),
    saved: Sequence[Any] = (),
    call_inputs: Sequence[Any] = (),
    grads: Sequence[Any] = (),
    caches: Sequence[Any] = (),
    scaling: Sequence[Any] = (),
) -> tuple[list[Any], Sizes]:
    """The groups of ``PassTensors`` as one list. It is called in every pass, and so takes them as they are: a record would cost as much again."""
    sizes = len(passing), len(args), len(saved), len(call_inputs), len(grads), len(caches), len(scaling)
    return [*passing, *args, *saved, *call_inputs, *grads, *caches, *scaling], sizes


def places_of(sizes: Sizes) -> Places:
    """Where the groups lie in the list that ``pack`` gave with these sizes."""
    return PassTensors(*[slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)])


def unpack(leaves: list[Any], sizes: Sizes) -> PassTensors[list[Any]]:
    """The inverse of ``pack``, for a program, which knows the sizes before it has a list."""
    return PassTensors(*[leaves[place] for place in places_of(sizes)])
