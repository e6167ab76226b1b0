"""Where an operation ran under delayed scaling, so that quantizers that are asked of it show the pipeline's state."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Literal, NamedTuple

from fusible.nvte import current_pass
from fusible.quantized import DelayedScaling, Float8Quantizer, ScalingState

if TYPE_CHECKING:
    from fusible.pytorch.runner import PipelineRunner

__all__ = ["RanIn"]


class RanIn(NamedTuple):
    """The pipeline that ran an operation last, its place there, and the recipe."""

    runner: weakref.ref[PipelineRunner]
    position: int
    recipe: DelayedScaling

    def show(self, quantizer: Float8Quantizer, mode: Literal["forward", "backward"], name: str) -> None:
        """Give ``quantizer`` the scale by which the tensor ``name`` will be quantized next, and the largest magnitude seen since that scale was made:
        copies, for the state is not the caller's to write. Within a pass it has the pass's own scale, and keeps it."""
        runner = self.runner()
        snapshot = runner.scaling.upcoming(self.recipe) if runner is not None and not current_pass().scales else None
        if snapshot is None:
            return
        state: ScalingState = getattr(snapshot, mode)
        slot = f"{self.position}.{name}"
        if slot in state.slots:
            i = state.slots.index(slot)
            quantizer.scale, quantizer.amax = state.scale[i : i + 1].clone(), state.amax_history[0, i : i + 1].clone()
