"""The pipeline in which an operation ran under delayed scaling: the operation's quantizers show that pipeline's scales and amaxes."""

from __future__ import annotations

import weakref
from typing import Any, Literal, NamedTuple

from fusible.nvte import current_pass
from fusible.pytorch.ops.protocols import BasicOperationLike
from fusible.quantized import DelayedScaling, Float8Quantizer, Quantizer, ScalingState

__all__ = ["RanIn", "shown"]


class RanIn(NamedTuple):
    """The pipeline that ran an operation last, its place there, and the recipe."""

    runner: weakref.ref[Any]
    """A ``PipelineRunner``."""
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

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of the operation, or one that is loaded, has run nowhere."""
        return type(None), ()


def shown(operation: BasicOperationLike, mode: Literal["forward", "backward"], index: int) -> Quantizer | None:
    """The ``index``-th quantizer of an operation; one of delayed scaling with the state of the pipeline that ran the operation last. It is the same
    object each time, which has the scale of the moment when it was asked for."""
    quantizer = operation._quantizers[mode][index] if operation._quantizers is not None else None
    ran_in: RanIn | None = vars(operation).get("_ran_in")
    if ran_in is not None and isinstance(quantizer, Float8Quantizer):
        ran_in.show(quantizer, mode, operation.quantized_names(mode)[index])
    return quantizer
