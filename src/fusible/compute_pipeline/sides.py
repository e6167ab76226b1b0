"""Side values: which op's side output goes to which op's side input. The one rule, for every list of ops and whichever container holds them.

**Names that an op's author gave** (``Op.side_outputs``, ``Op.side_inputs``) are brackets: an output is taken once, by the next op that takes the
name; of several that are open under one name the latest goes first. What is never taken, or was never given, is refused.

**Channels**, names that a user gave to the extra tensors of operations, belong to the *block* in which the operation that gives them stands: the
container (``Sequential``, ``Residual``), but no fused operation, for that is only another way to write its parts. An extra input takes the channel
of the innermost block around it that has the name. So what a block gives is seen by later operations of the block and of the blocks within, and not
outside; two blocks may use one name, and a block that stands at two places has two channels. A block gives a name once: by several operations, or by
a later one only, is refused. A channel is taken any number of times, and its gradient is the sum; where nobody takes it, it is dropped.

**Extra tensors without a channel** are the caller's, in the order of the operations, and so are outputs with a channel that go to the caller too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fusible.errors import ArgumentError, expected
from fusible.ops import Op

__all__ = ["Extras", "OpenSides", "Routing", "route"]


@dataclass(frozen=True)
class Extras:
    """The extra tensors of an operation: the channel of each input and of each output, None for the caller's own; and of each output whether the
    caller gets it. ``title``: the operation's name, as errors say it."""

    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    to_caller: tuple[bool, ...]
    title: str


class Routing(NamedTuple):
    """``ops``: the ops, those with extra tensors told what side values these are. ``inputs``, ``outputs``: of these the caller's, in order."""

    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


Block = tuple[int, ...]
"""A container's place: that of each container on the way to it, within the one before."""


def route(ops: Sequence[tuple[Op, Extras | None, Block]]) -> Routing:
    """Name the extra tensors of operations, by caller and place or by channel and consumer. An op that is no operation (``Extras`` None) keeps its
    names. Raises ``ArgumentError`` for channels that do not match."""
    if all(extras is None for _, extras, _ in ops):
        return Routing(tuple(op for op, _, _ in ops), (), ())
    makers = _makers(ops)
    consumers: dict[tuple[Block, str], list[str]] = {key: [] for key in makers}
    counts: dict[str, int] = {}
    inputs: list[str] = []
    taken: list[tuple[str, ...]] = []
    for position, (_, extras, _) in enumerate(ops):
        names: list[str] = []
        for index, channel in enumerate(extras.inputs if extras is not None else ()):
            if channel is None:
                names.append(f"input_{position}_{index}")
                inputs.append(names[-1])
                continue
            key = _seen(makers, channel, position, ops[position])
            names.append(f"channel_{channel}_{counts.get(channel, 0)}")
            counts[channel] = counts.get(channel, 0) + 1
            consumers[key].append(names[-1])
        taken.append(tuple(names))
    outputs: list[str] = []
    routed: list[Op] = []
    for position, (op, extras, block) in enumerate(ops):
        if extras is None:
            routed.append(op)
            continue
        routes: list[tuple[str, ...]] = []
        for index, (channel, to_caller) in enumerate(zip(extras.outputs, extras.to_caller, strict=True)):
            names = [] if channel is None else consumers[block, channel]
            if to_caller:
                outputs.append(f"output_{position}_{index}")
                names = [*names, outputs[-1]]
            routes.append(tuple(names))
        produced = tuple(name for names in routes for name in names)
        routed.append(op.with_(side_inputs=taken[position], side_outputs=produced, routes=tuple(routes)))
    return Routing(tuple(routed), tuple(inputs), tuple(outputs))


def _makers(ops: Sequence[tuple[Op, Extras | None, Block]]) -> dict[tuple[Block, str], int]:
    """By block and channel, the place of the op that gives it."""
    makers: dict[tuple[Block, str], int] = {}
    for position, (_, extras, block) in enumerate(ops):
        for channel in extras.outputs if extras else ():
            if channel is None:
                continue
            if (block, channel) in makers:
                do = "give each extra output of a block its own"
                raise ArgumentError(expected("one producer", of=f"the channel {channel!r}", got="several", do=do))
            makers[block, channel] = position
    return makers


def _seen(makers: dict[tuple[Block, str], int], channel: str, position: int, entry: tuple[Op, Extras | None, Block]) -> tuple[Block, str]:
    """The channel that an operation takes: of the innermost block around it that has one of the name."""
    _, extras, block = entry
    key = next((found for depth in range(len(block), -1, -1) if (found := (block[:depth], channel)) in makers), None)
    if key is not None and makers[key] < position:
        return key
    title = extras.title if extras is not None else ""
    elsewhere = any(name == channel for _, name in makers)
    got = "a later one" if key is not None else "one in a block that does not hold it" if elsewhere else "none"
    do = "bind an extra output before it, in the same block or in one around it"
    raise ArgumentError(expected("an earlier operation that gives it", of=f"the channel {channel!r} that {title} reads", got=got, do=do))


class OpenSides:
    """On a walk over ops, the side values that have been given and not yet taken, each with a note of the walker's."""

    def __init__(self, values: Iterable[tuple[str, Any]] = ()) -> None:
        self.open: list[tuple[str, Any]] = list(values)

    def give(self, names: Iterable[str], note: Any) -> None:
        self.open += [(name, note) for name in names]

    def take(self, name: str, default: Any = None) -> Any:
        """The note of the latest of the name; ``default`` where none is open."""
        for place in range(len(self.open) - 1, -1, -1):
            if self.open[place][0] == name:
                return self.open.pop(place)[1]
        return default
