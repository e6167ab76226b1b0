"""A call of a container: its parts are called one after another, with extra tensors and padding passed along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from fusible.errors import ArgumentError, expected
from fusible.pytorch.engine.batch import without_padding
from fusible.pytorch.engine.kv_cache import KVCache

__all__ = ["ChainCall", "ChainPart", "Passage", "check_extra_inputs", "go_through"]


class ChainCall(NamedTuple):
    """The arguments of a call that all parts of a chain get. ``keywords``: for the ``op_forward`` of operations, by their ids."""

    seq_lens: torch.Tensor | None = None
    cache: KVCache | None = None
    keywords: Mapping[int, Mapping[str, Any]] = {}


class ChainPart:
    """A part that takes more than ``x``: a pipeline, or a module of ours. Any other module takes one value and returns one."""

    clears_padding: ClassVar[bool] = False
    """Whether its output for a padded batch has zeros for padding, whatever its input had there."""

    @property
    def public_extra_inputs(self) -> int:
        """The number of extra inputs, of all operations in it, that no channel feeds at present: these come from the caller."""
        return 0

    def in_chain(self, x: Any, extra: Sequence[torch.Tensor], call: ChainCall) -> Any:
        """Call it on ``x`` and its own extra inputs. Returns ``y``, or a tuple of it and the extra outputs."""
        raise NotImplementedError


class Passage:
    """A call in progress: ``y``, the output of the part before (at first ``x``), and the extra outputs of the parts so far, in order.

    ``extra``: the extra inputs of all ``parts`` in their order, of which each takes its own. Raises ``ArgumentError`` for another number of them,
    before any part is called.
    """

    def __init__(self, title: str, parts: Sequence[Any], x: Any, extra: Sequence[torch.Tensor], call: ChainCall) -> None:
        check_extra_inputs(sum([_extra_inputs(part) for part in parts]), len(extra), title)
        self.y: Any = x
        self._left, self._call = list(extra), call
        self._outputs: list[torch.Tensor] = []
        self._has_padding = call.seq_lens is not None

    def through(self, part: Any) -> None:
        """Call ``part``."""
        if isinstance(part, ChainPart):
            count = _extra_inputs(part)
            taken, self._left = self._left[:count], self._left[count:]
            result = part.in_chain(self.y, taken, self._call)
            self.y, *outputs = result if isinstance(result, tuple) else (result,)
            self._outputs += outputs
            cleared = part.clears_padding
        else:
            self.y, cleared = part(self.y), False
        self._has_padding = self._call.seq_lens is not None and not cleared

    def result(self) -> Any:
        """What the container returns: ``y``, with zeros for padding, or a tuple of it and the extra outputs."""
        y = without_padding(self.y, self._call.seq_lens) if self._has_padding else self.y
        return (y, *self._outputs) if self._outputs else y


def go_through(passage: Passage, parts: Sequence[Any]) -> Any:
    """Call ``parts``, one after another: the result.

    Where ``torch.compile`` traces, without a loop, and by a function that is no method: it leaves a function alone in whose loop the graph breaks, or
    at whose break a method of what it has made is called, and goes on to trace piece by piece what that calls, as if nobody traced it.
    """
    if not torch.compiler.is_compiling():
        for part in parts:
            passage.through(part)
    elif parts:
        passage.through(parts[0])
        return go_through(passage, parts[1:])
    return passage.result()


def check_extra_inputs(wanted: int, got: int, title: str) -> None:
    """Raise ``ArgumentError`` for a call of ``title`` with another number of extra inputs than it takes."""
    if wanted != got:
        do = "give one for each extra input that no channel feeds"
        raise ArgumentError(expected(f"{wanted} extra inputs", of=f"a call of {title}", got=got, do=do))


def _extra_inputs(part: Any) -> int:
    return part.public_extra_inputs if isinstance(part, ChainPart) else 0
