"""``WithParameters``: the base of basic operations with parameters, which decides when these are filled."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from fusible.pytorch.engine.sequence_parallel import materialized
from fusible.pytorch.ops.op import BasicOperation

__all__ = ["WithParameters"]


class WithParameters(BasicOperation):
    """An operation whose parameters ``reset_parameters`` fills: when it is made, or before the first forward where they are on the meta device."""

    _rng_state_tracker_function: Callable[[], Any] | None = None

    def reset_parameters(self) -> None:
        """Fill the parameters; what is on the meta device is made first, on the default device."""
        raise NotImplementedError

    @property
    def _on_meta(self) -> bool:
        return any(parameter.is_meta for parameter in self.parameters())

    def _fill(self) -> None:
        if not self._on_meta:
            self.reset_parameters()

    def _materialize(self) -> None:
        for name, parameter in list(self._parameters.items()):
            if parameter is not None and parameter.is_meta:
                self._parameters[name] = materialized(parameter)

    def _draw_weight(self, weight: torch.Tensor) -> None:
        """Fill a product's weight, uniform in ``+-1/sqrt(in_features)``."""
        tracker = self._rng_state_tracker_function
        with tracker().fork() if tracker is not None else nullcontext():
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5.0))

    def pre_first_fuser_forward(self) -> None:
        if self._on_meta:
            self.reset_parameters()
