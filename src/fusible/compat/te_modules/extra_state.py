"""``_extra_state``: the place that NVIDIA's modules have for their scaling states in every state dict."""

from __future__ import annotations

from typing import Any

import torch

from fusible.errors import CheckpointError, expected
from fusible.pytorch.modules.dictionaries import is_empty

__all__ = ["EmptyExtraState", "WithExtraState"]


class EmptyExtraState:
    """The part of a module that saves an empty one: scaling states go by ``scaling_state`` here."""

    def get_extra_state(self) -> torch.Tensor:
        """uint8 ``[0]``."""
        return torch.empty(0, dtype=torch.uint8)


class WithExtraState(EmptyExtraState):
    """The part of a module that is no pipeline, and reads it too."""

    def set_extra_state(self, state: Any) -> None:
        """Takes an empty one. Raises ``CheckpointError`` for another, which is a pickle."""
        if not is_empty(state):
            of, do = f"the _extra_state of {type(self).__name__}", "load it with strict=False"
            raise CheckpointError(expected("an empty one", of=of, got="another", do=do))
