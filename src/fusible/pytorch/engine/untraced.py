"""Calls around which ``torch.compile`` breaks its graph. To be imported by what is being traced: it brings the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusible.pytorch.engine.chain import ChainCall

__all__ = ["call_as_it_is"]


_REASON = "no compiler sees through operations in plain torch, what has effects, extra outputs of a pipeline, and gradients of weights held in 8 bits"


@torch.compiler.disable(reason=_REASON)
def call_as_it_is(module: Any, part: int, x: torch.Tensor, extra: Sequence[torch.Tensor], call: ChainCall) -> Any:
    """Call the ``part``-th pipeline of ``module`` by ``ChainPart.in_chain``."""
    return module.pipeline(part).in_chain(x, extra, call)
