"""Overlap of communication with products, which NVIDIA's modules have by memory that GPUs share: here the same is computed one after the other."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch

from fusible.errors import ArgumentError, DTypeError, expected

__all__ = ["UserBufferQuantizationMode", "destroy_ub", "initialize_ub", "warn_of_no_overlap"]


class UserBufferQuantizationMode(Enum):
    """The precision of what a buffer that overlaps communication with products holds."""

    NONE = "none"
    FP8 = "fp8"


@functools.cache  # a warning once a process; one that a filter turns into an error is not remembered, and comes again
def warn_of_no_overlap() -> None:
    """Say that communication which was asked to overlap with products does not."""
    told = "initialize_ub and the ub_... options change nothing here: communication and products come one after the other, with the same results"
    warnings.warn(told, RuntimeWarning, stacklevel=3)


def initialize_ub(
    shape: Sequence[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: list[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: dict[str, Any] | list[dict[str, Any]] | None = None,
    bootstrap_backend: Any = None,
    with_cublasmp: bool = False,
) -> None:
    """Check the arguments, and make no buffers: overlap changes how long a step takes, and no number. Warns once that there is none.

    Raises ``DTypeError`` for ``quantization_modes`` that are no list of ``UserBufferQuantizationMode``, ``ArgumentError`` for a list ``ub_cfgs`` of
    another length; other arguments are not looked at.
    """
    modes = [UserBufferQuantizationMode.NONE] if not quantization_modes else quantization_modes
    if not isinstance(modes, list) or not all(isinstance(mode, UserBufferQuantizationMode) for mode in modes):
        of, do = "quantization_modes of initialize_ub", "name such modes"
        raise DTypeError(expected("a list of UserBufferQuantizationMode", of=of, got=repr(modes), do=do))
    if isinstance(ub_cfgs, list) and len(ub_cfgs) != len(modes):
        of, do = "ub_cfgs of initialize_ub", "give one for each of quantization_modes"
        raise ArgumentError(expected(f"{len(modes)}", of=of, got=len(ub_cfgs), do=do))
    warn_of_no_overlap()


def destroy_ub() -> None:
    """Give back the buffers that overlap communication with products: there are none here, so this does nothing."""
