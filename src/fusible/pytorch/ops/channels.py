"""The extra tensors of a basic operation, and the channels by which they go from one operation to another."""

from __future__ import annotations

from typing import Self

from fusible.compute_pipeline import Extras
from fusible.pytorch.ops.entry import check_channel
from fusible.pytorch.runner import BoundOp, note_change

__all__ = ["ExtraTensors"]


class ExtraTensors:
    """The part of ``BasicOperation`` that says where extra tensors come from and go to."""

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    _entry: BoundOp | None
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
        check_channel(self, "input", index, self.num_extra_inputs, channel)
        channels = list(self._extra_input_channels)
        channels[index] = channel
        self._extra_input_channels = channels
        self._rerouted()
        return self

    def set_extra_output_channel(self, index: int, channel: str | None, *, output_to_caller: bool = True) -> Self:
        """Hand an extra output to later operations of the same block, and of blocks in it, as ``channel``, and to the caller where
        ``output_to_caller``; None undoes it. It takes effect at the next call."""
        check_channel(self, "output", index, self.num_extra_outputs, channel)
        channels, to_caller = list(self._extra_output_channels), list(self._extra_output_to_caller)
        channels[index], to_caller[index] = channel, output_to_caller or channel is None
        self._extra_output_channels, self._extra_output_to_caller = channels, to_caller
        self._rerouted()
        return self

    def _rerouted(self) -> None:
        """Its channels have changed: pipelines that run it look at them before the next call."""
        if self._entry is not None:
            self._entry = self._entry._replace(extras=self.extras)
        self._changes += 1
        note_change()
