"""Writes into tensors that were made in ``torch.inference_mode``.

Torch refuses them outside of it, to protect autograd. A kernel writes by address and is never asked: the state of a recipe, and a copy of a
weight, that a first pass made for inference are written by the training that follows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["writing"]

_NOTHING = nullcontext()


def writing(*tensors: Tensor) -> AbstractContextManager[object]:
    """The context in which any of ``tensors`` may be written: inference mode where one was made in it, else none."""
    if torch.is_inference_mode_enabled() or not any(tensor.is_inference() for tensor in tensors):
        return _NOTHING
    return torch.inference_mode()
