"""The extra tensors of an operation, and the channels by which they go from one operation to another."""

from __future__ import annotations

from typing import Any, Self

from fusible.compute_pipeline import Extras
from fusible.errors import ArgumentError, expected
from fusible.pytorch.engine.bound import BoundOp, note_change

__all__ = ["ExtraTensors"]


class ExtraTensors:
    """Mixin of an operation, or of a module with a single op: where its extra tensors come from and go to."""

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    _bound_op: BoundOp | None
    _changes: int

    def _begin_channels(self) -> None:
        self._extra_input_channels: list[str | None] = [None] * self.num_extra_inputs
        self._extra_output_channels: list[str | None] = [None] * self.num_extra_outputs
        self._extra_output_to_caller: list[bool] = [True] * self.num_extra_outputs

    @property
    def extras(self) -> Extras | None:
        """Where its extra tensors come from and go to; None where it has none."""
        if not self.num_extra_inputs and not self.num_extra_outputs:
            return None
        channels = tuple(self._extra_input_channels), tuple(self._extra_output_channels), tuple(self._extra_output_to_caller)
        return Extras(*channels, type(self).__name__)

    @property
    def public_extra_inputs(self) -> int:
        return self._extra_input_channels.count(None)

    def set_extra_input_channel(self, index: int, channel: str | None) -> Self:
        """Take an extra input from an earlier operation's extra output of that channel, in the same block or one around it, and not from the caller;
        None undoes it. What a channel's name means is said in ``compute_pipeline/sides.py``.

        It takes effect at the next call. Returns the operation. Raises ``ArgumentError``.
        """
        _check_channel(self, "input", index, self.num_extra_inputs, channel)
        channels = list(self._extra_input_channels)
        channels[index] = channel
        self._extra_input_channels = channels
        self._rerouted()
        return self

    def set_extra_output_channel(self, index: int, channel: str | None, *, output_to_caller: bool = True) -> Self:
        """Hand an extra output to later operations of the same block, and of blocks in it, as ``channel``, and to the caller where
        ``output_to_caller``; None undoes it. It takes effect at the next call."""
        _check_channel(self, "output", index, self.num_extra_outputs, channel)
        channels, to_caller = list(self._extra_output_channels), list(self._extra_output_to_caller)
        channels[index], to_caller[index] = channel, output_to_caller or channel is None
        self._extra_output_channels, self._extra_output_to_caller = channels, to_caller
        self._rerouted()
        return self

    def _rerouted(self) -> None:
        """Its channels have changed: pipelines that run it look at them before the next call."""
        if self._bound_op is not None:
            self._bound_op = self._bound_op._replace(extras=self.extras)
        self._changes += 1
        note_change()


def _check_channel(op: Any, side: str, index: int, count: int, channel: str | None) -> None:
    """Raise ``ArgumentError`` for an extra tensor that there is not, and for a channel that is no name."""
    of = f"{type(op).__name__}.set_extra_{side}_channel"
    if not 0 <= index < count:
        raise ArgumentError(expected(f"an index below {count}, the number of extra {side}s", of=of, got=index, do="name one that there is"))
    if channel is not None and (not isinstance(channel, str) or not channel):
        raise ArgumentError(expected("a name or None", of=of, got=repr(channel), do="give a string that is not empty"))
