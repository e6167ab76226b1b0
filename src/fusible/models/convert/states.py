"""The scaling states of a converted model, which its state dict has no place for: that one's names are those of the library the model came from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from fusible.errors import CheckpointError, expected
from fusible.models.convert.pipelines import ConvertedModule

__all__ = ["load_scaling_states", "scaling_states"]


def scaling_states(model: nn.Module) -> dict[str, torch.Tensor]:
    """The scales and histories of delayed scaling of a converted model, by name, each a uint8 tensor; empty before the first call under it.

    Those of attention on 8-bit operands (``fp8_dpa``) are not among them. Without them, training that is resumed goes on with scales that begin anew,
    as those of a new model: the first iteration after that is scaled by 1, the next ones by what was seen. With ``load_scaling_states`` it goes on
    bit for bit.
    """
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, ConvertedModule):
            found.update({f"{name}.{own}" if name else own: state for own, state in module._saved_states().items()})
    return found


def load_scaling_states(model: nn.Module, states: Mapping[str, torch.Tensor]) -> None:
    """Go on from what ``scaling_states`` gave of a model that was converted alike. Raises ``CheckpointError``, and changes nothing then."""
    left, read = set(states), []
    for name, module in model.named_modules():
        if isinstance(module, ConvertedModule):
            prefix = f"{name}." if name else ""
            left -= {key for key in states if key.startswith(f"{prefix}scaling_state.")}
            read += module._read_states(states, prefix)
    if left:
        do = "convert the model as the one that they are of"
        raise CheckpointError(expected("states of its modules alone", of="load_scaling_states", got=f"also {min(left)!r}", do=do))
    for runner, state in read:
        runner.scaling.take(state)
